"""Calls of DynamiQ's kernels."""

from dynamiq.core.layout import Layout
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.wire import SUPERGROUP, TILE, Address
from dynamiq.roofline.case import Case
from tests.benchmarks.prepared import FORMATS, Prepared, entries_like_gradients
from tests.kernels.devices import on
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call

ROUNDINGS = ("stochastic", "correlated", "nearest")
DEFAULT = "stochastic"
ROUNDING = ("compress", "decompress_accumulate_recompress")
RANKS = 4


def prepare(case: Case, rounding: str | None, numel: int, device: str) -> Prepared:
    """Return a kernel's call on full supergroups of one width."""
    x = entries_like_gradients(numel, FORMATS[case.format])
    layout = Layout(numel, 1, SUPERGROUP)
    quantizer = operations.quantizer((case.width or 4,), rounding or DEFAULT)
    address = Address(seed=1, call=2, hop=0, sender=1, world_size=RANKS)
    tiles = -(-layout.positions // TILE)
    c = on(device, Call.of(x, layout, quantizer, address, tile_count=tiles, mixed=False))
    return _prepared(case, c, device)


def _prepared(case: Case, c: Call, device: str) -> Prepared:
    v, result, tiles, q = c.values, c.result, c.tiles, c.quantizer
    entries, out, sums = v.bucket.entries, result.bucket.entries, on(device, c.sums())
    payload, recompressed = (on(device, c.payload()) for _ in range(2))
    ops.compress(v, tiles, q, payload)
    stored = type(v)(v.bucket, v.factor, v.shift, sums)
    places = (tiles.units, tiles.cuts, tiles.offsets)
    own, ends = (entries, v.factor, v.shift), (result.factor, result.offset)
    both = (tiles, tiles)
    return {
        "statistics": lambda: Prepared(
            lambda: ops.statistics(v.bucket, RANKS), entries, (entries,), (v.factor, v.shift)
        ),
        "compress": lambda: Prepared(
            lambda: ops.compress(v, tiles, q, payload), entries, (*own, *places), (payload,)
        ),
        "decompress": lambda: Prepared(
            lambda: ops.decompress(payload, result, tiles, q),
            entries,
            (payload, *places, *ends),
            (out,),
        ),
        "decompress_accumulate": lambda: Prepared(
            lambda: ops.decompress_accumulate(payload, v, sums, tiles, q),
            entries,
            (payload, *own, *places),
            (sums,),
        ),
        "decompress_accumulate_recompress": lambda: Prepared(
            lambda: ops.decompress_accumulate_recompress(payload, v, both, q, recompressed),
            entries,
            (payload, *own, *places),
            (recompressed,),
        ),
        "store": lambda: Prepared(
            lambda: ops.store(stored, tiles.units, result),
            entries,
            (sums, tiles.units, *ends),
            (out,),
        ),
    }[case.kernel]()
