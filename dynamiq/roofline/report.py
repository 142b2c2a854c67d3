"""The rows as tables for people: one table per kernel, 80 columns."""

from collections.abc import Iterable
from itertools import groupby

from rich.console import Group
from rich.table import Table

from dynamiq.roofline.machine import MACHINES
from dynamiq.roofline.row import MEMORY_BOUND, Row

_NUMBERS = ("10⁶\nentries/s", "bytes/\nentry", "GB/s", "of a\ncopy", "instr./\nbyte")
_SHORT = {"stochastic": "stoch.", "correlated": "corr.", "nearest": "near.", "prescaled": "presc."}


def tables(rows: Iterable[Row]) -> Group:
    """Return all tables, and what their columns mean."""
    ordered = sorted(rows, key=lambda row: row.kernel)
    found = [_table(name, list(own)) for name, own in groupby(ordered, lambda row: row.kernel)]
    return Group(*found, "", *_legend(ordered))


def _table(kernel: str, rows: list[Row]) -> Table:
    table = Table(title=kernel, title_justify="left", box=None, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    has_operands = any(row.operands for row in rows)
    for column in ("", "format", "operands" if has_operands else "width", "round-\ning"):
        table.add_column(column)
    for column in _NUMBERS:
        table.add_column(column, justify="right")
    table.add_column("binds")
    for row in rows:
        intensity = row.instructions_per_byte
        table.add_row(
            "predicted" if row.predicted else "measured",
            row.format or "–",
            row.operands or str(row.width or "–"),
            _SHORT.get(row.rounding or "", "–"),
            f"{row.entries_per_s / 1e6:.0f}",
            f"{row.bytes_per_entry:.2f}",
            f"{row.bytes_per_s / 1e9:.1f}",
            f"{row.share_of_copy:.0%}",
            "–" if intensity is None else f"{intensity:.2f}",
            row.binds,
        )
    return table


def _legend(rows: list[Row]) -> list[str]:
    lines = []
    for machine, build, threads in dict.fromkeys(
        (row.machine, row.build, row.threads) for row in rows if not row.predicted
    ):
        lines.append(f"measured: {machine}; {build}; threads: {threads}")
    for name in dict.fromkeys(row.machine for row in rows if row.predicted):
        lines.append(f"predicted: {name}, never run; {MACHINES[name].source}")
    lines += [
        "Bytes are counted from the operands, each once. A copy: of the same entries, in the same "
        f"run. What binds is memory from {MEMORY_BOUND:.0%} of its bandwidth on, and below the "
        "core, computing or waiting for single lines. Instructions: on a host executed ones, a "
        "vector instruction once; predicted ones are all of a thread's machine code, for all kinds "
        "of operands, but in a build for one width.",
    ]
    return lines
