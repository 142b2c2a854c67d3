"""Bytes by formula are those of the tensors that an operation is handed."""

import pytest
import torch

from dynamiq.core.layout import Layout
from dynamiq.kernels.registry import ENTRY_DTYPES, WIDTHS, kernels_of
from dynamiq.kernels.supergroups.wire import Address
from dynamiq.roofline.traffic import COPY, ENTRY_BYTES, traffic
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call

SUPERGROUPS, TILES = 1024, 2


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
        moved = traffic(kernel, ENTRY_DTYPES[dtype], width, SUPERGROUPS)
        assert (moved.read_bytes, moved.written_bytes) == (read, wrote), kernel
        assert moved.moved_bytes == read + wrote


def test_every_kernel_and_format_is_counted():
    for spec in kernels_of("supergroups"):
        for entry_format in spec.entry_formats:
            assert traffic(spec.name, entry_format, 4 if spec.has_widths else None, 1).moved_bytes
    assert {name: dtype.itemsize for dtype, name in ENTRY_DTYPES.items()} == ENTRY_BYTES
