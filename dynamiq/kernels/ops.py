"""The operations that compressors call, one function each.

Today every one of them is the reference's. Other builds of the same operations are chosen here,
and nowhere else; :mod:`dynamiq.kernels.reference` specifies what they give.
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
