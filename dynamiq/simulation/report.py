"""The rows as tables for people, 80 columns."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group
from rich.table import Table

from dynamiq.simulation.row import HopRow, Row

_NUMBERS = ("vNMSE", "± over\nseeds", "pre-\ndicted", "bias", "weighted\nerror")
_SIZES = ("bits/\nentry", "kB/\nrank")
_MOST_HOPS = 14
_LEGEND = (
    "vNMSE: squared error of the sum over the squared sum. Bias: share of the squared error that "
    "all seeds have in common, ± its standard error. Weighted error: every entry's squared error "
    "over its mean square over ranks, relative to the same of the sum; entries near zero may "
    "decide it, and it did not predict training loss. Bits: sent per entry and pass, all "
    "metadata included."
)
_HOP_LEGEND = (
    "Added: squared error that messages of this hop add, over the energy of the final sum. Payload "
    "bits: without statistics."
)
_LIMIT_LEGEND = (
    "Limit: the least error of any description of the sum in so many bits, its entries Gaussian "
    "given the energy of their supergroup, and all metadata free."
)


def summary(rows: Sequence[Row]) -> Group:
    """Return a table per topology, and one per row of what its hops add."""
    found: list[Table | str] = []
    for topology, own in _by_topology(rows):
        found += [_title(own[0], topology), _table(own), ""]
    found.append(_LEGEND)
    with_hops = [row for row in rows if row.hops]
    for row in with_hops:
        budget = "" if row.bit_budget is None else f", {row.bit_budget:g} bits"
        found += ["", f"hops of the {row.topology}: {row.compressor}{budget}", _hop_table(row.hops)]
    return Group(*found, *(["", _HOP_LEGEND] if with_hops else []))


def ablation(rows: Sequence[Row]) -> Group:
    """Return a table per topology: what each step has, and how it compares with the one before."""
    found: list[Table | str] = []
    for topology, own in _by_topology(rows):
        table = _new("each row adds")
        for column in ("vNMSE", "± over\nseeds", "of the row\nbefore", "bits/\nentry"):
            table.add_column(column, justify="right")
        for before, row in zip([None, *own], own, strict=False):
            share = "" if before is None or not before.vnmse else f"{row.vnmse / before.vnmse:.2f}"
            numbers = f"{row.vnmse:.2e}", _spread(row.vnmse_spread), share
            table.add_row(row.compressor, *numbers, f"{row.bits_per_entry:.3f}")
        found += [_title(own[0], topology), table, ""]
    return Group(*found[:-1])


def sweep(rows: Sequence[Row], limit: Mapping[float, float]) -> Group:
    """Return a table per topology: vNMSE by budget and compressor, and the limit."""
    found: list[Table | str] = []
    for topology, own in _by_topology(rows):
        names = list(dict.fromkeys(row.compressor for row in own))
        table = _new("bits")
        for name in (*names, "limit"):
            table.add_column(name.replace("-", "-\n"), justify="right")
        errors = {(row.compressor, row.bit_budget): row.vnmse for row in own}
        for bits, least in limit.items():
            cells = [errors.get((name, bits)) for name in names]
            table.add_row(f"{bits:g}", *map(_number, cells), _number(least))
        for row in own:
            if row.bit_budget is None:
                cells = [row.vnmse if row.compressor == name else None for name in names]
                table.add_row(f"{row.bits_per_entry:g}", *map(_number, cells), _number(None))
        found += [f"vNMSE, {_title(own[0], topology)}", table, ""]
    return Group(*found, _LIMIT_LEGEND)


def _table(rows: Sequence[Row]) -> Table:
    table = _new("compressor")
    with_budgets = len({row.bit_budget for row in rows} - {None}) > 1
    if with_budgets:
        table.add_column("bits\nasked", justify="right")
    with_orders = any(row.order_spread is not None for row in rows)
    for column in (*_NUMBERS[:2], *(["± over\norders"] if with_orders else []), *_NUMBERS[2:]):
        table.add_column(column, justify="right")
    for column in _SIZES:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.compressor,
            *([_budget(row)] if with_budgets else []),
            f"{row.vnmse:.2e}",
            _spread(row.vnmse_spread),
            *([_spread(row.order_spread)] if with_orders else []),
            _number(row.predicted_vnmse),
            _bias(row),
            f"{row.weighted_error:.2e}",
            f"{row.bits_per_entry:.3f}",
            f"{row.bytes_per_rank / 1e3:.0f}",
        )
    return table


def _hop_table(hops: Sequence[HopRow]) -> Table:
    table = _new("")
    for column in ("ranks\nsummed", "transfers", "mean\nwidth", "payload\nbits", "added", "share"):
        table.add_column(column, justify="right")
    total = sum(hop.added for hop in hops) or 1.0
    for hop in _thinned(hops):
        table.add_row(
            "reduce" if hop.reduce else "gather",
            str(hop.summed),
            str(hop.transfers),
            "–" if hop.mean_width is None else f"{hop.mean_width:.2f}",
            f"{hop.payload_bits:.3f}",
            f"{hop.added:.2e}",
            f"{hop.added / total:.0%}",
        )
    return table


def _thinned(hops: Sequence[HopRow]) -> list[HopRow]:
    """Return all hops, or of too many those that sum powers of two and the last two."""
    if len(hops) <= _MOST_HOPS:
        return list(hops)
    return [h for h in hops[:-2] if h.summed & (h.summed - 1) == 0] + list(hops[-2:])


def _by_topology(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    for topology in dict.fromkeys(row.topology for row in rows):
        yield topology, [row for row in rows if row.topology == topology]


def _new(first: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.padding = (0, 1, 0, 0)
    table.add_column(first)
    return table


def _title(row: Row, topology: str) -> str:
    chunk = "in the chunk that stands for all" if row.one_chunk else "each"
    seeds = f"{row.seeds} seed" + ("s" if row.seeds > 1 else "")
    if row.orders > 1:
        seeds += f", {row.orders} orders of the ranks"
    return f"{topology}, {row.world_size} ranks, {row.entries} entries {chunk}, {seeds}"


def _spread(value: float | None) -> str:
    return "–" if value is None else f"{value:.0e}"


def _budget(row: Row) -> str:
    return "–" if row.bit_budget is None else f"{row.bit_budget:g}"


def _bias(row: Row) -> str:
    if row.bias is None:
        return "–"
    error = "" if row.bias_error is None else f"±{row.bias_error:.1%}"
    return f"{row.bias:.1%}{error}".removeprefix("-" if abs(row.bias) < 5e-4 else "")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2e}"
