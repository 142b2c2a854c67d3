"""What a run comes to: one table, for the terminal and for the page."""

from collections.abc import Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from evaluation.bench.records import AllReduceTask, BenchRow, Existing, Measured, TrainingTask

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
_ALL_REDUCE_HEAD = (
    "method",
    "ms",
    "range",
    "MB sent",
    "share of link rate",
    "× FP32's speed",
    "× BF16's speed",
    "codec ms",
    "wire ms",
    "cores",
    "vNMSE",
)
_TRAINING_HEAD = (
    "method",
    "step ms",
    "range",
    "MB sent",
    "exposed ms",
    "of step",
    "of BF16's",
    "codec ms",
    "wire ms",
    "cores",
)


def size(nbytes: int) -> str:
    """Return a number of bytes in the largest unit that leaves at least 1."""
    unit, one = next((unit, one) for unit, one in _UNITS if nbytes >= one)
    return f"{nbytes / one:g} {unit}"


def read_size(text: str) -> int:
    """Return what a text such as "64KiB" says.

    Raises:
        ValueError: it says nothing.
        KeyError: there is no such unit.
    """
    number = text.rstrip("bBiIkKmMgG")
    units = {unit.lower(): one for unit, one in _UNITS}
    return int(float(number) * units[text[len(number) :].lower() or "b"])


def title(row: BenchRow) -> str:
    """Return what was measured, in words."""
    task = row.settings
    if isinstance(task, AllReduceTask):
        what = f"all-reduce of {size(task.tensor_bytes)} FP32"
    else:
        what = f"DDP step of {task.workload.replace('_', ' ')}"
        if task.bucket_mib is not None:
            what += f", buckets of {task.bucket_mib:g} MiB"
    traffic = f", {task.flows} competing flows per host" if task.flows else ""
    return f"{what}, {task.world_size} hosts, {task.rate_mbit:g} Mbit/s{traffic}"


def note(row: BenchRow) -> str:
    """Return under which circumstances."""
    count = len(row.measured[0].times_s)
    what = "calls" if isinstance(row.settings, AllReduceTask) else "steps"
    return (
        f"Medians of {count} {what}; {row.link_mbit:.1f} Mbit/s measured by one TCP connection; "
        f"{row.machine_cores:.1f} of {row.environment['cpus']} processors busy meanwhile."
    )


def cells(row: BenchRow) -> tuple[Sequence[str], list[list[str]]]:
    """Return a head, and a line per method."""
    if isinstance(row.settings, TrainingTask):
        return _TRAINING_HEAD, [_training_cells(row, measured) for measured in row.measured]
    return _ALL_REDUCE_HEAD, [_all_reduce_cells(row, measured) for measured in row.measured]


def table(row: BenchRow) -> Table:
    """Return the table for a terminal."""
    head, lines = cells(row)
    result = Table(
        title=title(row),
        caption=note(row),
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    shown = [i for i, name in enumerate(head) if name != "range"]  # terminals are narrow
    for i in shown:
        name = head[i].replace(" ", "\n") if i else head[i]
        result.add_column(name, justify="right" if i else "left", no_wrap=i > 0)
    for line in lines:
        result.add_row(*(line[i] for i in shown))
    return result


def speedup(measured: Measured, reference: Measured | None) -> float | None:
    """Return how many times faster a method is: the median of the rounds' ratios."""
    if reference is None:
        return None
    return median(r / m for r, m in zip(reference.times_s, measured.times_s, strict=True))


def exposed_s(row: BenchRow, measured: Measured) -> float | None:
    """Return what communication adds to a step, as far as the run tells."""
    alone = row.find("none")
    return None if alone is None else measured.median_s - alone.median_s


def _all_reduce_cells(row: BenchRow, measured: Measured) -> list[str]:
    return [
        *_times(measured),
        f"{max(measured.sent_bytes) / 1e6:.3g}",
        f"{measured.link_share(row.settings.rate_mbit):.2f}",
        _optional(speedup(measured, row.find("fp32")), ".2f"),
        _optional(speedup(measured, row.find("bf16")), ".2f"),
        *_costs(measured),
        _optional(measured.vnmse, ".1e"),
    ]


def _training_cells(row: BenchRow, measured: Measured) -> list[str]:
    exposed, bf16 = exposed_s(row, measured), row.find("bf16")
    reference = None if bf16 is None else exposed_s(row, bf16)
    communicates = measured.method != Existing(name="none")
    shown = exposed if communicates else None
    return [
        *_times(measured),
        f"{max(measured.sent_bytes) / 1e6:.3g}",
        _optional(shown and 1e3 * shown, ".0f"),
        _optional(shown and shown / measured.median_s, ".2f"),
        _optional(shown / reference if shown and reference else None, ".2f"),
        *_costs(measured),
    ]


def _times(measured: Measured) -> list[str]:
    low, high = 1e3 * min(measured.times_s), 1e3 * max(measured.times_s)
    form = ".0f" if low >= 100 else ".1f"
    return [
        measured.label,
        f"{1e3 * measured.median_s:{form}}",
        f"{low:{form}} to {high:{form}}",
    ]


def _costs(measured: Measured) -> list[str]:
    codec, wire = (s and 1e3 * s for s in (measured.codec_s, measured.wire_s))
    return [_optional(codec, ".1f"), _optional(wire, ".1f"), f"{measured.cores:.2f}"]


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
