"""The picture of a plan: error against step time, and the front that nothing beats."""

from pathlib import Path

from dynamiq.core.errors import InputError
from dynamiq.planner.plan import Plan
from dynamiq.planner.search import Candidate, format_name

SUFFIXES = (".png", ".svg", ".pdf")


def draw(plan: Plan, path: Path) -> None:
    """Write the candidates' errors against their step times; needs no display.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "a plot needs matplotlib: pip install 'dynamiq-allreduce[simulate]'"
        ) from error
    figure = Figure(figsize=(8, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(*_points(plan.front), color="0.6", marker="o", markersize=5, label="front")
    others = [c for c in plan.alternatives if c not in plan.front]
    axes.plot(*_points(others), linestyle="", marker="x", color="C0", label="other formats")
    axes.plot(*_points((plan.chosen,)), linestyle="", marker="*", markersize=14, label="plan")
    for candidate in (*plan.front, *others):
        if candidate.vnmse:
            name = format_name(candidate.configuration.compressor)
            axes.annotate(name, (1e3 * candidate.time.step_s, candidate.vnmse), fontsize="x-small")
    plain_ms = 1e3 * plan.baseline.time.step_s
    axes.axvline(plain_ms, color="0.3", linestyle=":", label="without compression")
    if plan.objective.goal == "fastest":
        axes.axhline(plan.objective.max_vnmse, color="C3", linestyle="--", label="error allowed")
    axes.set_yscale("log")
    axes.set_xlabel("step, ms")
    axes.set_ylabel("vNMSE of the sum, predicted")
    axes.set_title(f"{plan.workload} on {plan.cluster}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def _points(candidates: tuple[Candidate, ...] | list[Candidate]) -> tuple[list[float], list[float]]:
    """Return step times in ms, and the errors of those that have any."""
    known = [c for c in candidates if c.vnmse]
    return [1e3 * c.time.step_s for c in known], [c.vnmse or 0.0 for c in known]
