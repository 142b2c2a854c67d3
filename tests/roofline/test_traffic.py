"""Bytes by formula are those of the tensors that an operation is handed."""

import pytest
import torch

from dynamiq.core.errors import KernelError
from dynamiq.core.layout import Layout
from dynamiq.kernels.registry import ENTRY_DTYPES, ENTRY_FORMATS, KERNELS, WIDTHS
from dynamiq.kernels.supergroups.wire import Address
from dynamiq.roofline.case import Case
from dynamiq.roofline.families import COPY, FAMILIES, traffic
from dynamiq.roofline.traffic import ENTRY_BYTES, UNIT
from tests.benchmarks import of_hadamard, of_mx
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call

SUPERGROUPS, TILES = 1024, 2
ENTRIES = 1 << of_hadamard.LOG_BLOCK


def nbytes(*tensors):
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ENTRY_DTYPES)
def test_every_operand_counts_once(dtype, width):
    x = torch.randn(SUPERGROUPS * 256).to(dtype)
    layout, address = Layout(len(x), 1, 256), Address(0, 0, 0, 0, 1)
    quantizer = operations.quantizer((width,))
    c = Call.of(x, layout, quantizer, address, tile_count=TILES, mixed=False)
    payload, sums, values, result = c.payload(), c.sums(), c.values, c.result
    places = nbytes(c.tiles.units, c.tiles.cuts, c.tiles.offsets)
    own = nbytes(x, values.factor, values.shift)
    energy_and_mean = nbytes(values.factor, values.shift)
    written = nbytes(result.bucket.entries)
    result_range = nbytes(result.factor, result.offset)

    expected = {
        COPY: (nbytes(x), written),
        "statistics": (nbytes(x), energy_and_mean),
        "compress": (own + places, nbytes(payload)),
        "decompress": (nbytes(payload) + places + result_range, written),
        "decompress_accumulate": (nbytes(payload) + own + places, nbytes(sums)),
        "decompress_accumulate_recompress": (nbytes(payload) + own + places, nbytes(payload)),
        "store": (nbytes(sums, c.tiles.units) + result_range, written),
    }
    for kernel, (read, wrote) in expected.items():
        moved = traffic(Case(kernel, ENTRY_DTYPES[dtype], width), SUPERGROUPS)
        assert (moved.read_bytes, moved.written_bytes) == (read, wrote), kernel
        assert moved.moved_bytes == read + wrote


PREPARED = [
    pytest.param(module, case, id=f"{case.kernel}-{case.format}-{case.operands}")
    for name, module in (("mx", of_mx), ("hadamard", of_hadamard))
    for case in FAMILIES[name].cases(ENTRY_FORMATS, WIDTHS)
]


@pytest.mark.parametrize(("module", "case"), PREPARED)
def test_bytes_are_those_of_what_the_kernels_take_and_write(module, case):
    call = module.prepare(case, None, ENTRIES, "cpu")
    moved = traffic(case, ENTRIES // UNIT)
    assert (moved.read_bytes, moved.written_bytes) == (nbytes(*call.read), nbytes(*call.written))
    (written,) = call.written
    in_place = any(written is tensor for tensor in call.read)
    results = []
    for byte in (0, 255):
        if not in_place:
            written.view(torch.uint8).fill_(byte)
        call.run()
        results.append(written.view(torch.uint8).clone())
    assert in_place or torch.equal(*results), "every byte is written"


def test_every_kernel_and_format_is_counted():
    found = [case for f in FAMILIES.values() for case in f.cases(ENTRY_FORMATS, [4])]
    for spec in KERNELS.values():
        mine = {case.format for case in found if case.kernel == spec.name}
        assert mine == (set(spec.entry_formats) or {None} if spec.family in FAMILIES else set())
    assert all(traffic(case, 1).moved_bytes for case in found)
    assert {name: dtype.itemsize for dtype, name in ENTRY_DTYPES.items()} == ENTRY_BYTES


def test_what_has_no_bytes_per_entry_is_refused():
    with pytest.raises(KernelError, match="fill moves no fixed number of bytes per entry"):
        traffic(Case("fill", None), 1)
