"""A plan for people: a table of the best candidates, where a step's time goes, and the advice."""

from collections.abc import Iterator, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dynamiq.planner.cost.model import StepTime
from dynamiq.planner.plan import Plan
from dynamiq.planner.search import Candidate, format_name
from dynamiq.planner.units import show_size, show_time

_WIDTH = 60
_STYLES = ("green", "yellow", "red")
_BLOCKS = ("█", "▓", "░")
_PARTS = ("compute", "slowed by encoding", "waiting for communication")


def summary(plan: Plan, *, explain: bool, front: bool) -> Group:
    """Return all that is known of a plan.

    Args:
        plan: The plan.
        explain: Also show the terms that a step's time consists of.
        front: Show the Pareto front instead of the best of each format.
    """
    shown = plan.front if front else plan.alternatives
    title = (
        "none is both faster and better"
        if front
        else "the best that meet the target, by format and topology"
    )
    parts: list[Table | Text | str] = [
        f"{plan.workload} on {plan.cluster}",
        "",
        _candidates(plan, shown, title),
        "",
        *_bars(plan),
    ]
    if explain:
        parts += ["", _terms(plan)]
    parts += ["", Text(plan.advice, style="bold")]
    parts += [f"Assumed: {sentence}" for sentence in plan.assumptions]
    return Group(*parts)


def _candidates(plan: Plan, shown: Sequence[Candidate], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for column in ("", "format", "topology"):
        table.add_column(column)
    for column in ("bucket\nMiB", "step", "exposed", "× plain", "vNMSE"):
        table.add_column(column, justify="right")
    rows = [*shown, *[c for c in (plan.chosen, plan.baseline) if c not in shown]]
    for candidate in dict.fromkeys(rows):
        configuration, time = candidate.configuration, candidate.time
        cap = configuration.bucket_cap_mb
        table.add_row(
            "→" if candidate == plan.chosen else "",
            format_name(configuration.compressor),
            configuration.topology.kind,
            "default" if cap is None else str(cap),
            show_time(time.step_s),
            show_time(time.exposed_s),
            f"{plan.baseline.time.step_s / time.step_s:.2f}",
            "?" if candidate.vnmse is None else f"{candidate.vnmse:.1e}",
        )
    return table


def parts_of(time: StepTime) -> tuple[float, float, float]:
    """Return seconds of computing, of being slowed down by encoding, and of waiting."""
    slowed = max(0.0, time.backward_s - time.alone_s)
    return time.compute_s, slowed, max(0.0, time.exposed_s - slowed)


def _bars(plan: Plan) -> Iterator[Text | str]:
    rows = {"plan": plan.chosen, "without compression": plan.baseline}
    longest = max(candidate.time.step_s for candidate in rows.values())
    for name, candidate in rows.items():
        line = Text(f"{name:20}")
        for seconds, block, style in zip(parts_of(candidate.time), _BLOCKS, _STYLES, strict=True):
            line.append(block * round(seconds / longest * _WIDTH), style)
        yield line
    yield "  ".join(f"{b} {p}" for b, p in zip(_BLOCKS, _PARTS, strict=True))


def _terms(plan: Plan) -> Table:
    table = Table(title="terms of a step", title_justify="left", title_style="", box=None)
    for column in ("", "plan", "without compression"):
        table.add_column(column, justify="right" if column else "left")
    pairs = (plan.chosen, plan.baseline)
    terms = {
        "computing, without communication": [c.time.compute_s for c in pairs],
        "of it the backward pass": [c.time.alone_s for c in pairs],
        "backward pass beside encoding": [c.time.backward_s for c in pairs],
        "thread that encodes, busy": [c.time.codec_s for c in pairs],
        "busiest link": [c.time.wire_s for c in pairs],
        "communication not hidden": [c.time.exposed_s for c in pairs],
        "step": [c.time.step_s for c in pairs],
    }
    for name, values in terms.items():
        table.add_row(name, *map(show_time, values))
    table.add_row("sent by a rank", show_size(plan.sent_bytes), "")
    return table
