"""A trace as a picture: for every rank what it does, what is under way, and what its link sends."""

import re
from pathlib import Path
from typing import Any

from evaluation.bench.records import Span
from evaluation.bench.timeline import rates
from evaluation.bench.tracing import Trace

_COLOURS = {
    "statistics": "tab:purple",
    "encode": "tab:pink",
    "load": "tab:brown",
    "compress": "tab:red",
    "decompress_accumulate_recompress": "tab:orange",
    "decompress_accumulate": "gold",
    "decompress": "tab:green",
    "store": "tab:olive",
    "next_state": "tab:cyan",
}
_WAIT_COLOUR = "0.85"
# By what a transfer's name holds: of the steps of an exchange, every other one is darker.
_TRANSFER_COLOURS = {
    "header": ("0.6", "0.6"),
    "statistics": ("thistle", "plum"),
    "reduce-scatter": ("lightskyblue", "steelblue"),
    "all-gather": ("lightgreen", "mediumseagreen"),
}
_STEP = re.compile(r"step (\d+) of")
# Narrower bars have no room for a number.
_NUMBERED_SHARE = 0.012
_INCHES_PER_RANK = 1.6


def draw(trace: Trace, path: Path) -> None:
    """Write a PNG with one lane per rank; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = trace.task.world_size
    figure = Figure(figsize=(14, 1.4 + _INCHES_PER_RANK * ranks), layout="constrained")
    lanes = figure.subplots(ranks, 1, sharex=True, squeeze=False)[:, 0]
    start_s = min(trace.call.began_s)
    for rank, axes in enumerate(lanes):
        _draw_lane(axes, trace, rank, start_s)
    lanes[-1].set_xlabel("ms")
    lanes[-1].set_xlim(0, 1e3 * (max(trace.call.ended_s) - start_s))
    lanes[0].set_title(_title(trace), fontsize="medium")
    _draw_legend(figure)
    FigureCanvasAgg(figure).print_figure(path, dpi=110)


def _draw_lane(axes: Any, trace: Trace, rank: int, start_s: float) -> None:
    """Draw three bands: the processor at the top, transfers, and the link's rate at the bottom."""
    spans = trace.call.spans[rank]
    whole_s = max(trace.call.ended_s) - start_s
    segments = sorted({span.positions for span in spans if span.positions is not None})

    def bar(span: Span, bottom: float, height: float, colour: str, number: int | None) -> None:
        extent = _extent(span, start_s)
        axes.broken_barh([extent], (bottom, height), facecolors=colour)
        if number is not None and span.ended_s - span.began_s > _NUMBERED_SHARE * whole_s:
            centre = (extent[0] + extent[1] / 2, bottom + height / 2)
            axes.annotate(str(number), centre, ha="center", va="center", fontsize=6)

    for span in spans:
        if span.kind == "wait":
            bar(span, 2.05, 0.9, _WAIT_COLOUR, None)
        elif span.kind == "codec":
            number = None if span.positions is None else segments.index(span.positions) + 1
            bar(span, 2.05, 0.9, _COLOURS.get(span.name, "black"), number)
    transfers = [span for span in spans if span.kind == "transfer"]
    for span, (row, rows) in zip(transfers, _rows(transfers), strict=True):
        height = 0.9 / rows
        bar(span, 1.95 - (row + 1) * height, 0.9 * height, *_step(span))
    points = list(rates(trace.sent[rank]))
    shares = [8e-6 * rate_bytes / trace.task.rate_mbit for _, rate_bytes in points]
    times_ms = [1e3 * (when_s - start_s) for when_s, _ in points]
    # The token bucket's bursts would leave the band.
    heights = [0.9 * min(share, 1.1) for share in shares]
    axes.fill_between(times_ms, heights, step="post", color="0.3", linewidth=0)
    axes.axhline(0.9, color="0.3", linewidth=0.5, linestyle=":")
    axes.set_yticks([0.45, 1.5, 2.5], ["link", "transfers", "processor"], fontsize="small")
    axes.set_ylim(0, 3)
    axes.set_ylabel(f"rank {rank}")


def _step(transfer: Span) -> tuple[str, int | None]:
    """Return the colour of a transfer, and the number of its step."""
    found = _STEP.search(transfer.name)
    number = int(found[1]) if found else None
    named = [colours for name, colours in _TRANSFER_COLOURS.items() if name in transfer.name]
    light_and_dark = named[0] if named else ("0.6", "0.6")
    return light_and_dark[(number or 1) % 2], number


def _extent(span: Span, start_s: float) -> tuple[float, float]:
    return 1e3 * (span.began_s - start_s), 1e3 * (span.ended_s - span.began_s)


def _rows(transfers: list[Span]) -> list[tuple[int, int]]:
    """Return for each transfer a row where no other of its time is, and how many rows there are."""
    ends: list[float] = []
    chosen = []
    for span in sorted(transfers, key=lambda s: s.began_s):
        row = next((i for i, end in enumerate(ends) if end <= span.began_s), len(ends))
        ends[row : row + 1] = [span.ended_s]
        chosen.append((id(span), row))
    rows = dict(chosen)
    return [(rows[id(span)], len(ends)) for span in transfers]


def _draw_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(color=colour, label=name.replace("_", " ")) for name, colour in _COLOURS.items()
    ]
    entries += [
        Patch(color=_WAIT_COLOUR, label="wait"),
        Patch(color="0.3", label="link's rate (dotted: all of it)"),
        *(Patch(color=c[1], label=f"transfer: {name}") for name, c in _TRANSFER_COLOURS.items()),
    ]
    figure.legend(
        handles=entries,
        loc="outside lower center",
        ncols=5,
        fontsize="small",
        title="numbers: segments of the processor's work, steps of transfers",
        title_fontsize="small",
    )


def _title(trace: Trace) -> str:
    task = trace.task
    took_s = max(trace.call.ended_s) - min(trace.call.began_s)
    return (
        f"{task.method.label}: {task.tensor_bytes / 2**20:g} MiB on {task.world_size} hosts with "
        f"links of {task.rate_mbit:g} Mbit/s, {1e3 * took_s:.0f} ms"
    )
