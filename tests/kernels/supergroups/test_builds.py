"""Every build gives the reference's bits: any operation, width, dtype, rounding, tail and value."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core.layout import Layout
from dynamiq.kernels.supergroups import ops, reference
from dynamiq.kernels.supergroups.wire import Address
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call
from tests.kernels.supergroups.oracle import WIDTHS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-130), 3.4e38, -3.4e38, torch.inf, -torch.inf]


def bits(x):
    """Return a tensor whose comparison tells apart zeros and infinities, but not NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    if not x.is_floating_point():
        return x
    return torch.where(x.isnan(), torch.iinfo(integers).max, x.view(integers))


def assert_same(actual, expected):
    assert torch.equal(bits(actual), bits(expected))


def canonical(x):
    """Return the NaN of x as bits, each kind once."""
    return x[x.isnan()].view(torch.int16 if x.element_size() == 2 else torch.int32).unique()


@st.composite
def entries(draw, numel, dtype):
    """Return entries of all magnitudes, with some that are not numbers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(numel, generator=generator)
    exponent = draw(st.sampled_from([0, 0, -20, 20, 40, -60, -140, 100]))
    groups = torch.randn(-(-numel // 16), generator=generator).repeat_interleave(16)[:numel]
    x = x * 2.0 ** (3 * groups) * 2.0**exponent
    x[torch.rand(numel, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.9]))] = 0.0
    for value in draw(st.lists(st.sampled_from([*SPECIAL, torch.nan]), max_size=4)):
        x[draw(st.integers(0, numel - 1))] = value
    return x.to(dtype)


@st.composite
def calls(draw, dtypes=DTYPES):
    numel = draw(st.integers(1, 9000))
    n = draw(st.integers(1, 5))
    bounds = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=n - 1, max_size=n - 1)))
        bounds = (0, *cuts, numel)
    layout = Layout(numel, n, 256, bounds)
    widths = draw(st.sets(st.sampled_from(WIDTHS), min_size=1, max_size=5))
    quantizer = operations.quantizer(
        tuple(sorted(widths)),
        draw(st.sampled_from(["stochastic", "correlated", "nearest", "dithered"])),
        draw(st.sampled_from(["stochastic", "up", None])),
        draw(
            st.sampled_from([operations.EPSILON, {}, {4: 2.0, 8: 2.0}, {3: 0.5, 6: 0.2, 10: 0.1}])
        ),
    )
    sender = draw(st.integers(0, n - 1))
    address = Address(draw(st.integers(-(2**63), 2**63)), draw(st.integers(0, 2**40)), 3, sender, n)
    offset = draw(st.integers(0, 3))
    x = draw(entries(numel + offset, draw(st.sampled_from(dtypes))))[offset:]
    return Call.of(
        x,
        layout,
        quantizer,
        address,
        chunk=draw(st.integers(0, n - 1)),
        tile_count=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**32)),
        divisor=draw(st.sampled_from([1, n])),
        spare=draw(st.sampled_from([0, 2, 64, 94])),
        signs=draw(st.sampled_from([None, draw(st.integers(0, 2**64 - 1))])),
    )


@given(calls())
def test_every_operation_gives_the_references_bits(call):
    check_every_operation(call)


def check_every_operation(c):
    """Compare what ``ops`` gives with the reference."""
    for ours, theirs in zip(
        ops.statistics(c.values.bucket, c.layout.world_size),
        reference.statistics(c.values.bucket, c.layout.world_size),
        strict=True,
    ):
        assert_same(ours, theirs)
        assert canonical(ours).tolist() in ([], [NAN[torch.float32]])

    payload, expected = c.payload(), c.payload()
    ops.compress(c.values, c.tiles, c.quantizer, payload)
    reference.compress(c.values, c.tiles, c.quantizer, expected)
    assert torch.equal(payload, expected)

    result, expected_result = operations.fresh(c.result), operations.fresh(c.result)
    ops.decompress(payload, result, c.tiles, c.quantizer)
    reference.decompress(payload, expected_result, c.tiles, c.quantizer)
    assert_same(result.bucket.entries, expected_result.bucket.entries)
    assert canonical(result.bucket.entries).tolist() in ([], [NAN[result.bucket.entries.dtype]])

    sums, expected_sums = c.sums(), c.sums()
    ops.decompress_accumulate(payload, c.values, sums, c.tiles, c.quantizer)
    reference.decompress_accumulate(payload, c.values, expected_sums, c.tiles, c.quantizer)
    assert_same(sums, expected_sums)
    for values in (c.values, replace(c.values, sums=sums.clone())):
        once, expected = c.payload(), c.payload()
        both = (c.tiles, c.tiles)
        ops.decompress_accumulate_recompress(payload, values, both, c.quantizer, once)
        reference.decompress_accumulate_recompress(payload, values, both, c.quantizer, expected)
        assert torch.equal(once, expected)
    ops.decompress_accumulate(payload, replace(c.values, sums=sums), sums, c.tiles, c.quantizer)
    reference.decompress_accumulate(
        payload, replace(c.values, sums=expected_sums), expected_sums, c.tiles, c.quantizer
    )
    assert_same(sums, expected_sums)
    result, expected_result = operations.fresh(c.result), operations.fresh(c.result)
    for values in (c.values, replace(c.values, sums=sums)):
        ops.store(values, c.tiles.units, result)
        reference.store(values, c.tiles.units, expected_result)
        assert_same(result.bucket.entries, expected_result.bucket.entries)
