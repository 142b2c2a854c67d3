"""A GPU gives the host's bits: every operation, width, dtype, rounding, tail and value."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from dynamiq.core.layout import Layout
from dynamiq.kernels.registry import WIDTHS, kernels_of
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.wire import Address
from tests.kernels.devices import on
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call, fresh
from tests.kernels.supergroups.test_builds import DTYPES, bits, calls

ROUNDINGS = ["stochastic", "correlated", "nearest", "dithered"]
SIGNS = 2**63 + 11


def everything(c: Call) -> Iterator[tuple[str, Tensor]]:
    """Run every operation where the call's tensors are; yield what each wrote, by its name."""
    device = c.values.bucket.entries.device
    payload, recompressed, again = (on(device, c.payload()) for _ in range(3))
    sums, both = on(device, c.sums()), (c.tiles, c.tiles)
    for part in ops.statistics(c.values.bucket, c.layout.world_size):
        yield "statistics", part
    ops.compress(c.values, c.tiles, c.quantizer, payload)
    yield "compress", payload
    result = fresh(c.result)
    ops.decompress(payload, result, c.tiles, c.quantizer)
    yield "decompress", result.bucket.entries
    ops.decompress_accumulate(payload, c.values, sums, c.tiles, c.quantizer)
    yield "decompress_accumulate", sums.clone()
    held = replace(c.values, sums=sums)
    for values, out in ((c.values, recompressed), (held, again)):
        ops.decompress_accumulate_recompress(payload, values, both, c.quantizer, out)
        yield "decompress_accumulate_recompress", out
    for values in (c.values, held):
        result = fresh(c.result)
        ops.store(values, c.tiles.units, result)
        yield "store", result.bucket.entries


def small_call(dtype: torch.dtype, rounding: str, *, rotated: bool = False) -> Call:
    """Return a call with a tail, several tiles and all widths; rotated, with one scale each."""
    x = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    address = Address(seed=1, call=2, hop=1, sender=1, world_size=3)
    quantizer = operations.quantizer(WIDTHS, rounding, None if rotated else "stochastic")
    options = {"chunk": 1, "tile_count": 2, "signs": SIGNS if rotated else None}
    return Call.of(x[1:], Layout(19_999, 3, 256), quantizer, address, **options)


def assert_the_same_bits(call: Call) -> None:
    ours = everything(on("cuda", call))
    for (name, actual), (_, expected) in zip(ours, everything(call), strict=True):
        assert torch.equal(bits(actual.cpu()), bits(expected)), name


def test_no_kernel_is_forgotten():
    found = list(everything(small_call(torch.float32, "stochastic")))
    assert {name for name, _ in found} == {spec.name for spec in kernels_of("supergroups")}
    assert all(isinstance(written, Tensor) for _, written in found)


@pytest.mark.gpu
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_call(dtype, rounding, rotated):
    """Few and short launches: what compute-sanitizer can watch."""
    assert_the_same_bits(small_call(dtype, rounding, rotated=rotated))


@pytest.mark.gpu
@given(calls())
def test_any_call(call):
    assert_the_same_bits(call)
