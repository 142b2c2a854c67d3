"""The picture of a sweep: error against bits, and the limit that nothing can cross."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dynamiq.core.errors import InputError
from dynamiq.simulation.row import Row

SUFFIXES = (".png", ".svg", ".pdf")
_LINES = ("-", "--", ":", "-.")
_MARKERS = "osD^vP*X"


def draw(rows: Sequence[Row], limit: Mapping[float, float], path: Path) -> None:
    """Write vNMSE against bits per entry, one curve per compressor and topology.

    Compressors have colours and markers, topologies line styles. A format without a budget is a
    single point, or a horizontal line if it has more bits than the limit was computed for. Needs
    no display.

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
    names = list(dict.fromkeys(row.compressor for row in rows))
    kinds = list(dict.fromkeys(row.topology for row in rows))
    for (name, kind), curve in groupby(rows, key=lambda row: (row.compressor, row.topology)):
        points = sorted((row.bits_per_entry, row.vnmse) for row in curve)
        (bits, vnmse), number = points[0], names.index(name)
        line = _LINES[kinds.index(kind) % len(_LINES)]
        style: dict[str, Any] = {"color": f"C{number % 10}", "linestyle": line}
        if bits > max(limit):
            # A format of so many bits would leave the others no room.
            axes.axhline(vnmse, **style, linewidth=1, label=f"{name}, {kind}: {bits:g} bits")
            continue
        marker = _MARKERS[number % len(_MARKERS)]
        label = f"{name}, {kind}"
        axes.plot(*zip(*points, strict=True), **style, marker=marker, markersize=4, label=label)
    axes.plot(*zip(*limit.items(), strict=True), color="0.3", label="rate-distortion limit")
    axes.set_yscale("log")
    axes.set_xlabel("bits per entry, all metadata included (limit: without)")
    axes.set_ylabel("vNMSE of the sum")
    axes.set_title(f"{rows[0].world_size} ranks, {rows[0].entries} entries", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
