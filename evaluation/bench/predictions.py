"""Predicted beside measured steps: the cells of runs, what they come to, and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynamiq import Uncompressed
from dynamiq.planner.cost.model import Configuration, Model
from dynamiq.planner.profiles.workload import WorkloadProfile
from evaluation.bench.planned import PlannedFindings, PlannedRow
from evaluation.bench.records import Existing, Measured, Ours

WITHIN = 0.25
# What a plan must gain to be worth it: dynamiq.planner's own threshold.
_WORTH_IT = 0.05
_HEAD = (
    "method",
    "measured ms",
    "range",
    "predicted ms",
    "error",
    "exposed ms",
    "predicted exposed ms",
)
_INTRODUCTION = """\
# What the planner says, and what steps take

Hosts are network namespaces on one machine, joined by a switch; each sends at most at the given
rate. In each run the same ranks first measure links and formats (`dynamiq.probe`), then note when
each gradient of the workload is ready, in DDP with a hook that sends nothing; then they train by
every method in turn, round after round. From the two profiles of its run alone, the planner
predicts each method's step: no figure is fitted to a measured step, but for the step that sends
nothing, which is measured in turn with the others: the timeline is stretched to it, since this
machine's speed changes within minutes. Methods are pipelines with default segments and DDP's
default buckets; "exposed" is a step's time beyond that of one that sends nothing.
"""


@dataclass(frozen=True)
class Cell:
    """One method at one rate.

    Attributes:
        measured: what it took.
        method: what it was.
        predicted_s: a step.
    """

    measured: Measured
    method: Ours
    predicted_s: float

    @property
    def measured_s(self) -> float:
        """A step."""
        return self.measured.median_s

    @property
    def error(self) -> float:
        """By how much the prediction is too long, relative to what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def compresses(self) -> bool:
        """Whether it is anything but the gradients as they are."""
        return self.method.compressor != Uncompressed("fp32")


@dataclass(frozen=True)
class Choice:
    """What the planner would do among the methods of a run.

    Attributes:
        chosen: the predicted best, or the best that does not compress if that is about as good.
        best: the measured best.
    """

    chosen: Cell
    best: Cell

    @property
    def loss(self) -> float:
        """By how much the choice is slower than the best, measured."""
        return self.chosen.measured_s / self.best.measured_s - 1


def cells(row: PlannedRow) -> list[Cell]:
    """Return the cells of a run."""
    bucket_mib = row.settings.training.bucket_mib
    model = Model(row.found.hardware, workload(row.found))
    found = []
    for measured in row.found.measured:
        method = measured.method
        if isinstance(method, Ours):
            configuration = Configuration(
                compressor=method.compressor,
                topology=method.topology,
                segments=method.segments,
                bucket_cap_mb=None if bucket_mib is None else round(bucket_mib),
            )
            found.append(Cell(measured, method, model.predict(configuration).step_s))
    return found


def workload(found: PlannedFindings) -> WorkloadProfile:
    """Return the workload of a run, stretched to the step that was measured in turn."""
    profile = found.workload
    alone = next(m for m in found.measured if m.method == Existing(name="none"))
    stretch = alone.median_s / profile.step_s
    gradients = tuple(
        g.model_copy(update={"ready_s": g.ready_s * stretch}) for g in profile.gradients
    )
    return profile.model_copy(
        update={
            "step_s": alone.median_s,
            "backward_s": profile.backward_s * stretch,
            "gradients": gradients,
        }
    )


def choice(found: Sequence[Cell]) -> Choice:
    """Return what would be chosen: compression has to be worth it."""
    predicted = min(found, key=lambda cell: cell.predicted_s)
    plain = [cell for cell in found if not cell.compresses]
    if plain:
        quickest = min(plain, key=lambda cell: cell.predicted_s)
        if predicted.predicted_s > (1 - _WORTH_IT) * quickest.predicted_s:
            predicted = quickest
    return Choice(predicted, min(found, key=lambda cell: cell.measured_s))


def median_error(found: Sequence[Cell]) -> float:
    """Return the median of the errors' sizes."""
    return median(abs(cell.error) for cell in found)


def quantile_error(found: Sequence[Cell], share: float) -> float:
    """Return the size that this share of the errors does not exceed."""
    sizes = sorted(abs(cell.error) for cell in found)
    return sizes[max(0, -(-int(share * 1000) * len(sizes) // 1000) - 1)]


def write_page(rows: Sequence[PlannedRow], output: Path, command: str) -> None:
    """Write the page.

    Raises:
        ValueError: there are no rows.
    """
    if not rows:
        raise ValueError("no rows: do some runs first")
    every = sorted(rows, key=lambda row: row.settings.training.rate_mbit)
    found = [(row, cells(row)) for row in every]
    text = [_INTRODUCTION, _summary(found), *map(_section, every)]
    text.append(_origin(every, command))
    output.write_text("\n".join(text), "utf-8")


def _summary(found: Sequence[tuple[PlannedRow, list[Cell]]]) -> str:
    everything = [cell for _, own in found for cell in own]
    lines = [
        "| Mbit/s | cells | median error | 9 of 10 within | chosen | measured best | slower |",
        "| ---: | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    for row, own in found:
        made = choice(own)
        lines.append(
            f"| {row.settings.training.rate_mbit:g} | {len(own)} | {median_error(own):.1%} "
            f"| {quantile_error(own, 0.9):.1%} | {made.chosen.measured.label} "
            f"| {made.best.measured.label} | {made.loss:.1%} |"
        )
    within = sum(abs(cell.error) <= WITHIN for cell in everything) / len(everything)
    sentence = (
        f"Over all {len(everything)} cells the median error is {median_error(everything):.1%}; "
        f"{within:.0%} are within {WITHIN:.0%}. Chosen is the method with the least predicted "
        f"step, or an uncompressed one unless compression gains {_WORTH_IT:.0%}; slower is how "
        f"much longer its measured step is than the measured best."
    )
    return "\n".join([*lines, "", sentence, ""])


def table(row: PlannedRow) -> Table:
    """Return what a run came to, for a terminal."""
    result = Table(title=_title(row), caption=_note(row), box=SIMPLE_HEAD, pad_edge=False)
    shown = [i for i, name in enumerate(_HEAD) if name != "range"]  # terminals are narrow
    for i in shown:
        name = _HEAD[i].replace(" ", "\n") if i else _HEAD[i]
        result.add_column(name, justify="right" if i else "left", no_wrap=True)
    for line in _lines(row):
        result.add_row(*(line[i] for i in shown))
    return result


def _section(row: PlannedRow) -> str:
    ruler = ["---"] + ["---:"] * (len(_HEAD) - 1)
    lines = "\n".join(f"| {' | '.join(line)} |" for line in (_HEAD, ruler, *_lines(row)))
    return f"## {_title(row)}\n\n{_note(row)}\n\n{lines}\n\n`{row.command}`\n"


def _title(row: PlannedRow) -> str:
    task = row.settings.training
    return f"{task.workload.replace('_', ' ')}, {task.world_size} hosts, {task.rate_mbit:g} Mbit/s"


def _note(row: PlannedRow) -> str:
    found, link = row.found, row.found.hardware.network
    return (
        f"Medians of {len(found.measured[0].times_s)} steps; {row.link_mbit:.1f} Mbit/s by one TCP "
        f"connection; the probe found {link.bandwidth_bytes_per_s * 8e-6:.1f} Mbit/s and "
        f"{1e3 * link.latency_s:.2f} ms; {row.machine_cores:.1f} of {row.environment['cpus']} "
        f"processors busy meanwhile."
    )


def _lines(row: PlannedRow) -> list[list[str]]:
    alone = workload(row.found).step_s
    predicted = {cell.measured.label: cell for cell in cells(row)}
    lines = []
    for measured in row.found.measured:
        low, high = 1e3 * min(measured.times_s), 1e3 * max(measured.times_s)
        line = [measured.label, f"{1e3 * measured.median_s:.0f}", f"{low:.0f} to {high:.0f}"]
        cell = predicted.get(measured.label)
        exposed = f"{1e3 * (measured.median_s - alone):.0f}"
        if cell is None:
            line += ["", "", exposed, ""]
        else:
            error, left = f"{cell.error:+.1%}", f"{1e3 * (cell.predicted_s - alone):.0f}"
            line += [f"{1e3 * cell.predicted_s:.0f}", error, exposed, left]
        lines.append(line)
    return lines


def _origin(rows: Sequence[PlannedRow], command: str) -> str:
    commits = sorted({row.commit or "no checkout" for row in rows})
    facts = rows[-1].environment
    return (
        f"## How it was made\n\n{len(rows)} runs at {', '.join(commits)}, on {facts['processor']} "
        f"({facts['cpus']} processors), with torch {facts['packages']['torch']}. The page is made "
        f"from their rows by\n\n    {command}\n"
    )
