"""What operations refuse, and that they read and write wherever tensors are in memory."""

from dataclasses import replace

import pytest
import torch

from dynamiq.core.errors import InputError
from dynamiq.core.layout import Layout
from dynamiq.kernels.supergroups import ops, reference
from dynamiq.kernels.supergroups.tables import tables_of
from dynamiq.kernels.supergroups.wire import Address
from tests.kernels.supergroups import operations, oracle
from tests.kernels.supergroups.operations import Call


def call(x):
    address = Address(seed=1, call=2, hop=3, sender=0, world_size=2)
    quantizer = operations.quantizer((2, 4, 16))
    return Call.of(x, Layout(len(x), 2, 256), quantizer, address, tile_count=2, divisor=2)


@pytest.fixture
def arguments():
    """Valid arguments of every operation, by name."""
    c = call(torch.randn(5000, generator=torch.Generator().manual_seed(0)))
    return {
        "values": replace(c.values, sums=c.sums()),
        "result": c.result,
        "tiles": c.tiles,
        "payload": c.payload(),
        "sums": c.sums(),
        "bucket": c.values.bucket,
        "call": c,
    }


def statistics(a):
    ops.statistics(a["bucket"], 2)


def compress(a):
    c = a["call"]
    ops.compress(a["values"], a["tiles"], c.quantizer, a["payload"])


def decompress(a):
    ops.decompress(a["payload"], a["result"], a["tiles"], a["call"].quantizer)


def decompress_accumulate(a):
    ops.decompress_accumulate(a["payload"], a["values"], a["sums"], a["tiles"], a["call"].quantizer)


def decompress_accumulate_recompress(a):
    c = a["call"]
    tiles = (c.tiles, a["tiles"])
    ops.decompress_accumulate_recompress(c.payload(), a["values"], tiles, c.quantizer, a["payload"])


def store(a):
    ops.store(a["values"], a["tiles"].units, a["result"])


READ_VALUES = [compress, decompress_accumulate, decompress_accumulate_recompress, store]
WRITE_RESULTS = [decompress, store]
USE_TILES = [compress, decompress, decompress_accumulate, decompress_accumulate_recompress]
USE_UNITS = [*USE_TILES, store]

every_wrong_tensor = {
    "dtype": lambda x: x.to(torch.int32 if x.dtype != torch.int32 else torch.int16),
    "stride": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "device": lambda x: x.to("meta"),
    "size": lambda x: torch.cat([x, x]),
    "dimensions": lambda x: x[None],
}

FIELDS = [
    *[(("bucket", "entries"), [statistics]), (("bucket", "slices"), [statistics])],
    *[(("values", "bucket", field), READ_VALUES) for field in ("entries", "slices")],
    *[(("values", field), READ_VALUES) for field in ("factor", "shift", "sums")],
    *[(("result", "bucket", field), WRITE_RESULTS) for field in ("entries", "slices")],
    *[(("result", field), WRITE_RESULTS) for field in ("factor", "offset")],
    (("tiles", "units"), USE_UNITS),
    *[(("tiles", field), USE_TILES) for field in ("cuts", "offsets")],
    (("payload",), USE_TILES),
    (("sums",), [decompress_accumulate]),
]
CASES = [
    (path, operation, wrong)
    for path, operations_of_path in FIELDS
    for operation in operations_of_path
    for wrong in every_wrong_tensor
    # A bucket may have any number of entries; those of values are as many as its slices say.
    if not (wrong == "size" and path[-1] in {"entries", "slices"})
]


def changed(value, path, change):
    """Return a value with the tensor at a path of fields changed."""
    if not path:
        return change(value)
    return replace(value, **{path[0]: changed(getattr(value, path[0]), path[1:], change)})


@pytest.mark.parametrize(
    ("path", "operation", "wrong"),
    CASES,
    ids=[f"{operation.__name__}-{'.'.join(path)}-{wrong}" for path, operation, wrong in CASES],
)
def test_a_wrong_tensor_is_refused_by_name(arguments, path, operation, wrong):
    operation(arguments)
    name, *fields = path
    arguments[name] = changed(arguments[name], fields, every_wrong_tensor[wrong])
    with pytest.raises(InputError) as caught:
        operation(arguments)
    named = {"entries": "bucket", "units": "tiles"}.get(path[-1], path[-1])
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("operation", "name", "dtype", "bytes_off"),
    [
        (compress, "payload", torch.uint8, 1),
        (decompress, "payload", torch.uint8, 1),
        (decompress_accumulate, "sums", torch.float32, 4),
    ],
)
def test_memory_at_a_wrong_address_is_refused(arguments, operation, name, dtype, bytes_off):
    right = arguments[name]
    memory = torch.zeros(right.numel() + 16, dtype=dtype)
    first = bytes_off // right.element_size()
    arguments[name] = memory[first : first + right.numel()].view_as(right)
    with pytest.raises(InputError, match=r"address|aligned to 16 bytes"):
        operation(arguments)


def test_incoming_and_outgoing_tiles_hold_the_same_supergroups(arguments):
    tiles = arguments["tiles"]
    arguments["tiles"] = replace(
        tiles,
        units=tiles.units.view(1, -1),
        cuts=tiles.cuts[:1],
        offsets=tiles.offsets[::2].contiguous(),
    )
    with pytest.raises(InputError, match="must hold the same supergroups"):
        decompress_accumulate_recompress(arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 8, 13])
def test_entries_may_begin_anywhere_and_their_neighbours_stay(dtype, offset):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5000 + 32, generator=generator).to(dtype)
    part = slice(offset, offset + 5000)
    here, elsewhere = call(x[part]), call(x[part].clone())
    payload, expected = here.payload(), elsewhere.payload()
    ops.compress(here.values, here.tiles, here.quantizer, payload)
    reference.compress(elsewhere.values, elsewhere.tiles, elsewhere.quantizer, expected)
    assert torch.equal(payload, expected)

    memory = torch.full_like(x, -7.0)
    bucket = replace(here.result.bucket, entries=memory[part])
    ops.decompress(payload, replace(here.result, bucket=bucket), here.tiles, here.quantizer)
    result = operations.fresh(elsewhere.result)
    reference.decompress(payload, result, here.tiles, here.quantizer)
    torch.testing.assert_close(memory[part], result.bucket.entries, rtol=0, atol=0, equal_nan=True)
    assert (memory[:offset] == -7.0).all()
    assert (memory[offset + 5000 :] == -7.0).all()


@pytest.mark.parametrize("field", ["factor", "shift"])
def test_own_entries_are_brought_into_range_while_they_are_read(field):
    """As sums that are entry · factor − shift, and zero beyond the last entry."""
    c = call(torch.randn(5000, generator=torch.Generator().manual_seed(2)))
    values = replace(c.values, **{field: 2.0 ** torch.arange(len(c.values.factor))})
    rows = torch.zeros(2, c.layout.positions * 256)
    for row, x in zip(rows, c.values.bucket.entries.view(2, -1), strict=True):
        row[: len(x)] = x
    inside = torch.zeros_like(rows, dtype=torch.bool)
    inside[:, :2500] = True
    own = rows.view(-1, 256) * values.factor[:, None] - values.shift[:, None]
    own = torch.where(inside.view(-1, 256), own, 0.0)
    there = (c.tiles.units >= 0)[:, :, None]
    sums = torch.where(there, own[c.tiles.units], 0.0)
    payload, expected = c.payload(), c.payload()
    ops.compress(values, c.tiles, c.quantizer, payload)
    ops.compress(replace(values, sums=sums), c.tiles, c.quantizer, expected)
    assert torch.equal(payload, expected)


@pytest.mark.parametrize("build", [ops, reference])
def test_torchs_default_dtype_does_not_matter(build):
    c = call(torch.randn(5000, generator=torch.Generator().manual_seed(2)))
    quantizer = operations.quantizer((2, 3, 16), epsilon={3: 0.7})
    written = []
    for dtype in (torch.float64, torch.float32):
        tables_of.cache_clear()
        torch.set_default_dtype(dtype)
        try:
            payload, result = c.payload(), operations.fresh(c.result)
            build.compress(c.values, c.tiles, quantizer, payload)
            build.decompress(payload, result, c.tiles, quantizer)
            both, again = (c.tiles, c.tiles), c.payload()
            build.decompress_accumulate_recompress(payload, c.values, both, quantizer, again)
            energy, mean = build.statistics(c.values.bucket, 2)
            written.append([energy, mean, payload, again, result.bucket.entries])
        finally:
            torch.set_default_dtype(torch.float32)
    for one, other in zip(*written, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_a_result_is_divided_shifted_scaled_and_limited():
    sums = torch.linspace(-100, 100, 256).view(1, 1, 256)
    rows = torch.full((3, 256), -7.0)
    factor, offset = torch.tensor([1.0, 0.5, 1.0]), torch.tensor([0.0, 3.0, torch.nan])
    result = replace(
        operations.result_of(rows), factor=factor, offset=offset, divisor=4.0, limit=40.0
    )
    for unit in (1, 2):
        ops.store(operations.values_of(sums), torch.tensor([[unit]]), result)
    assert (rows[0] == -7.0).all()
    assert torch.equal(rows[1], ((sums[0, 0] / 4.0 + 3.0) / 0.5).clamp(-40.0, 40.0))
    assert rows[2].isnan().all()


def test_flushing_denormals_changes_nothing():
    """A setting of the calling thread alone, which the threads of the pool do not have."""
    x = (2.0**-140 * torch.arange(1, 513)).view(1, 2, 256)
    result = operations.result_of(torch.zeros(2, 256))
    torch.set_flush_denormal(True)
    ops.store(operations.values_of(x), torch.tensor([[0, 1]]), result)
    torch.set_flush_denormal(False)
    assert torch.equal(result.bucket.entries, x.view(-1))


def test_the_largest_numbers_do_not_round_to_infinity():
    tiles = oracle.tiles([[16]], (16,))
    payload = torch.empty(tiles.nbytes, dtype=torch.uint8)
    values = operations.values_of(torch.full((1, 1, 256), 3.4e38))
    ops.compress(values, tiles, operations.quantizer((16,)), payload)
    assert payload.view(torch.bfloat16).unique().tolist() == [torch.finfo(torch.bfloat16).max]


def test_autograd_notices_that_a_tensor_was_written():
    b = torch.ones(512, requires_grad=True).exp()
    with torch.no_grad():
        result = operations.result_of(b.view(2, 256))
        sums = operations.values_of(torch.zeros(1, 2, 256))
        ops.store(sums, torch.tensor([[0, 1]]), result)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        b.sum().backward()


@pytest.mark.parametrize("bits", [0x7FC00001, 0x7F800001, -1, -0x400000])
def test_every_nan_becomes_the_same_one(bits):
    x = torch.zeros(256)
    x.view(torch.int32)[7] = bits
    for statistic in ops.statistics(operations.bucket_of(x.view(1, 256)), 1):
        assert statistic.view(torch.int32).tolist() == [0x7FC00000]
    result = operations.result_of(torch.zeros(1, 256))
    ops.store(operations.values_of(x.view(1, 1, 256)), torch.tensor([[0]]), result)
    assert result.bucket.entries.view(torch.int32)[7] == 0x7FC00000


def test_a_group_that_is_not_zero_has_a_scale_that_is_not():
    """Rounded up, even where 255 times its share of the scale is no number of FP32 any more."""
    x = torch.zeros(1, 1, 256)
    x[0, 0, 0], x[0, 0, 16] = 2.0**-149, 1e30
    tiles = oracle.tiles([[4]], (4,))
    payload = torch.empty(tiles.nbytes, dtype=torch.uint8)
    ops.compress(
        operations.values_of(x),
        tiles,
        operations.quantizer((4,), group_scales="up"),
        payload,
    )
    ((coded,), _) = oracle.read_tile(payload, [4])
    assert coded.group_codes.tolist()[:3] == [1, 255, 0]
