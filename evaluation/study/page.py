"""The page of the study: a table per workload and optimiser, and a picture of them all."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evaluation.study.aggregate import Estimate, Line, Section, rank_correlation, sections
from evaluation.study.records import Row

_COLOURS = {
    "bf16": "0.45",
    "paper": "tab:red",
    "local": "tab:green",
    "local-tempered": "tab:olive",
    "rotated": "tab:blue",
    "rotated-tempered": "tab:cyan",
}
_WORKLOADS = {
    "language_model": "Language model of 5.9 million parameters, from scratch on film reviews",
    "sentences": "BERT of 22.7 million parameters, fine-tuned on Rotten Tomatoes sentences",
    "questions": "BERT of 17.4 million parameters, fine-tuned on TREC-6 questions",
}
_INTRODUCTION = """\
# What compressed gradients cost in training

{ranks} virtual ranks in one process: each one's gradient is computed on its own batch, and the
mean comes out of the very all-reduce of a real run (`dynamiq.core.metrics.simulate`), with the
whole gradient as one bucket. Runs of one seed share initial weights, batches and dropout; every
increase is against the uncompressed run of the same seed, mean ± standard error over seeds.

vNMSE, the weighted error (every entry's squares divided by its mean square over the ranks at that
step; entries that are zero everywhere are left out) and Adam's (divided by Adam's own second
moment after the step) are means over every tenth step. Bits count everything sent. "tempered"
recipes have `energy_power=0.5`; "rotated-tempered" is the default of `DynamiQCompressor`. What
follows from it: [recipes](../design/recipes.md#what-training-prefers).

![loss increase against bits and errors]({picture})
"""
_HEAD = (
    "recipe",
    "bits",
    "seeds",
    "loss increase",
    "training loss increase",
    "accuracy, points",
    "vNMSE",
    "weighted error",
    "Adam's error",
)
Errors = dict[str, Callable[[Line], float | None]]
_ERRORS: Errors = {
    "vNMSE": lambda line: line.vnmse,
    "weighted error": lambda line: line.weighted,
    "Adam's error": lambda line: line.adam,
}


_LEAST_ROWS = 6
"""Of which a rank correlation says anything."""


def write_page(rows: Sequence[Row], output: Path, command: str) -> Path:
    """Write the page and, beside it, its picture; returns the picture's path.

    Raises:
        ValueError: there are no rows, or two that are the same run.
    """
    if not rows:
        raise ValueError("no rows: do some runs first")
    parts = sections(rows)
    picture = output.with_suffix(".png")
    ranks = ", ".join(str(n) for n in sorted({section.world_size for section in parts}))
    text = [_INTRODUCTION.format(ranks=ranks, picture=picture.name)]
    text += [_section(section) for section in parts]
    text.append(_origin(rows, command))
    output.write_text("\n".join(text), "utf-8")
    _draw(parts, picture)
    return picture


def _section(section: Section) -> str:
    title = _WORKLOADS.get(section.workload, section.workload)
    lines = [f"## {title}: {section.optimizer}\n"]
    lines.append(
        f"{section.steps} steps, peak learning rate {section.learning_rate:g}, "
        f"{section.topology}. {_references(section)}\n"
    )
    lines.append(_table_row(_HEAD))
    lines.append(_table_row(["---"] + ["---:"] * (len(_HEAD) - 1)))
    lines += [_table_row(_cells(line)) for line in section.lines]
    lines.append(f"\n{_correlations(section)}")
    if section.unpaired:
        lines.append(f"Without an uncompressed run beside them: {', '.join(section.unpaired)}.")
    return "\n".join(lines) + "\n"


def _references(section: Section) -> str:
    rows = list(section.references.values())
    if not rows:
        return "No uncompressed run."
    text = f"Uncompressed: loss {_plain(Estimate.of([row.final.loss for row in rows]), '.4f')}"
    accuracies = [100 * row.final.accuracy for row in rows if row.final.accuracy is not None]
    if accuracies:
        text += f", accuracy {_plain(Estimate.of(accuracies), '.1f')} %"
    return f"{text} (seeds: {len(rows)})."


def _cells(line: Line) -> list[str]:
    accuracy = line.accuracy_increase
    points = accuracy and Estimate(
        100 * accuracy.mean, None if accuracy.error is None else 100 * accuracy.error
    )
    return [
        line.recipe,
        f"{line.bits_per_entry:.2f}",
        str(len(line.seeds)),
        _plain(line.loss_increase, "+.4f"),
        _plain(line.training_loss_increase, "+.4f"),
        "" if points is None else _plain(points, "+.2f"),
        f"{line.vnmse:.2e}",
        f"{line.weighted:.2e}",
        "" if line.adam is None else f"{line.adam:.2e}",
    ]


def _correlations(section: Section) -> str:
    # One seed shows no scatter, and of a few rows any order is likely.
    lines = [line for line in section.lines if line.bits is not None and len(line.seeds) > 1]
    if len(lines) < _LEAST_ROWS:
        return f"Fewer than {_LEAST_ROWS} rows of several seeds: no rank correlation."
    increases = [line.loss_increase.mean for line in lines]
    found = []
    for name, measure in _ERRORS.items():
        values = [value for line in lines if (value := measure(line)) is not None]
        if len(values) == len(lines):
            correlation = rank_correlation(values, increases)
            if correlation is not None:
                found.append(f"{name} {correlation:.2f}")
    if not found:
        return "All increases are the same: no rank correlation."
    return f"Rank correlation of the loss increase with: {', '.join(found)} ({len(lines)} rows)."


def _origin(rows: Sequence[Row], command: str) -> str:
    commits = sorted({row.commit or "no checkout" for row in rows})
    versions = {name: version for row in rows for name, version in row.versions.items()}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    hours = sum(row.training_s for row in rows) / 3600
    return (
        f"## How it was made\n\n{len(rows)} runs, {hours:.1f} hours of training steps, at "
        f"{', '.join(commits)}, with {listed}.\nOne row per run; the page is made from them by\n\n"
        f"    {command}\n"
    )


def _plain(estimate: Estimate, form: str) -> str:
    mean = f"{estimate.mean:{form}}"
    if not float(mean):
        mean = mean.replace("-", "+")
    return mean if estimate.error is None else f"{mean} ± {estimate.error:{form.lstrip('+')}}"


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _draw(parts: Sequence[Section], picture: Path) -> None:
    """Draw a row of panels per section: loss increase against bits and against each error.

    Recipes without a budget of bits are dashed lines: off the scale but in height.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns: Errors = {"bits per entry": lambda line: line.bits_per_entry, **_ERRORS}
    size = (4 * len(columns), 0.6 + 3.2 * len(parts))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(parts), len(columns), squeeze=False)
    labels: dict[str, Any] = {}
    for section, panels in zip(parts, grid, strict=True):
        for (name, measure), axes in zip(columns.items(), panels, strict=True):
            values = [measure(line) for line in section.lines if line.bits is not None]
            known = [value for value in values if value]
            if known:
                _panel(axes, section, measure)
                axes.set_xlabel(name)
                _scale(axes, name, known)
            else:
                axes.set_axis_off()
        handles, names = panels[0].get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
        panels[0].set_ylabel(f"{section.workload}, {section.optimizer}\nloss increase")
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=len(labels))
    FigureCanvasAgg(figure).print_figure(picture, dpi=130)


def _scale(axes: Any, name: str, values: Sequence[float]) -> None:
    """Choose an axis on which some numbers can be read."""
    from matplotlib.ticker import NullFormatter

    if name == "bits per entry":
        axes.set_xlim(min(values) - 0.5, max(values) + 0.5)  # runs of one budget differ in nothing
    elif max(values) > 10 * min(values):
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter(NullFormatter())  # they overlap


def _panel(axes: Any, section: Section, measure: Callable[[Line], float | None]) -> None:
    for line in section.lines:
        if line.bits is None:
            level = line.loss_increase.mean
            axes.axhline(level, color=_COLOURS.get(line.recipe), ls="--", label=line.recipe)
    for recipe in dict.fromkeys(line.recipe for line in section.lines if line.bits is not None):
        points = [
            (value, line.loss_increase)
            for line in section.lines
            if line.recipe == recipe and (value := measure(line)) is not None
        ]
        axes.errorbar(
            [value for value, _ in points],
            [increase.mean for _, increase in points],
            yerr=[increase.error or 0 for _, increase in points],
            color=_COLOURS.get(recipe),
            marker="o",
            capsize=3,
            label=recipe,
        )
    axes.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    axes.grid(alpha=0.3)
