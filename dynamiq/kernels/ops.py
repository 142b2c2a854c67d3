"""The operations that compressors call: typed, validated, dispatched by device.

One function per operation; :mod:`dynamiq.kernels.reference` specifies each.
"""

from torch import Tensor

from dynamiq.kernels import reference
from dynamiq.kernels.wire import Address, Quantizer, Tiles

statistics = reference.statistics
compress = reference.compress
decompress = reference.decompress
decompress_accumulate = reference.decompress_accumulate


def decompress_accumulate_recompress(
    payload: Tensor,
    values: Tensor,
    tiles: tuple[Tiles, Tiles],
    quantizer: Quantizer,
    address: Address,
    out: Tensor,
) -> None:
    """Add a payload to values and write the sum's payload, in one pass where a kernel can.

    ``tiles`` are the incoming and the outgoing message's.
    """
    reference.decompress_accumulate(payload, values, tiles[0], quantizer)
    reference.compress(values, tiles[1], quantizer, address, out)
