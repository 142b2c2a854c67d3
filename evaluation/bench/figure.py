"""Pictures of many runs: times and shares of the link rate against sizes, and steps as bars."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.bench import report
from evaluation.bench.records import AllReduceTask, BenchRow, Existing, TrainingTask

_WIDTH, _HEIGHT = 4.6, 3.4


def draw_all_reduces(rows: Sequence[BenchRow], path: Path) -> None:
    """Draw a column per number of hosts, rate and traffic: times above, shares below."""
    groups: dict[tuple[int, float, int], list[BenchRow]] = defaultdict(list)
    for row in rows:
        task = row.settings
        if isinstance(task, AllReduceTask):
            groups[task.world_size, task.rate_mbit, task.flows].append(row)
    figure, grid = _figure(2, len(groups))
    for (hosts, rate, flows), group, (above, below) in zip(
        groups, groups.values(), zip(*grid, strict=True), strict=True
    ):
        traffic = f", {flows} flows" if flows else ""
        above.set_title(f"{hosts} hosts, {rate:g} Mbit/s{traffic}", fontsize="medium")
        for label, points in _lines(group).items():
            sizes = [point[0] for point in points]
            style = {"marker": "o", "markersize": 3, "label": label}
            style["linestyle"] = "--" if label.startswith("Gloo") else "-"
            above.loglog(sizes, [point[1] for point in points], **style)
            below.semilogx(sizes, [point[2] for point in points], **style)
        below.set_ylim(0, 1)
        below.set_xlabel("tensor, bytes of FP32")
        for axes in (above, below):
            axes.grid(alpha=0.3)
    grid[0][0].set_ylabel("ms")
    grid[1][0].set_ylabel("share of the link rate")
    grid[0][0].legend(fontsize="x-small")
    _print(figure, path)


def draw_steps(rows: Sequence[BenchRow], path: Path) -> None:
    """Draw a panel per run: what a step takes without communication, and what that adds."""
    runs = [row for row in rows if isinstance(row.settings, TrainingTask)]
    figure, grid = _figure(1, len(runs))
    for row, axes in zip(runs, grid[0], strict=True):
        shown = [m for m in row.measured if m.method != Existing(name="none")]
        labels = [measured.label for measured in shown]
        exposed = [1e3 * (report.exposed_s(row, measured) or 0.0) for measured in shown]
        whole = [1e3 * measured.median_s for measured in shown]
        alone = [w - e for w, e in zip(whole, exposed, strict=True)]
        axes.barh(labels, alone, color="0.75", label="computing alone")
        axes.barh(labels, exposed, left=alone, color="tab:blue", label="exposed communication")
        axes.invert_yaxis()
        axes.set_xlabel("ms per step")
        axes.set_title(report.title(row), fontsize="small")
    grid[0][0].legend(fontsize="x-small")
    _print(figure, path)


def _lines(rows: Sequence[BenchRow]) -> dict[str, list[tuple[int, float, float]]]:
    """Return for each method the sizes, with median times in ms and shares of the link rate."""
    lines: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for row in rows:
        assert isinstance(row.settings, AllReduceTask)
        for measured in row.measured:
            share = measured.link_share(row.settings.rate_mbit)
            point = (row.settings.tensor_bytes, 1e3 * measured.median_s, share)
            lines[measured.method.label].append(point)
    return {label: sorted(points) for label, points in lines.items()}


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _print(figure: Any, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_figure(path, dpi=120)
