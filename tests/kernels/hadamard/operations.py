"""Any call of any operation: the laws of the builds draw from here."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.compressors.thc.compressor import RECEIVER_TABLE
from dynamiq.kernels.hadamard import ops
from dynamiq.kernels.hadamard.operands import (
    Blocks,
    Finish,
    Quantizer,
    integer_dtype,
    payload_bytes,
    width_of,
)

TABLES = (None, RECEIVER_TABLE, (0, 1), (0, 1, 40, 41, 42, 100, 1000))


@dataclass(repr=False)
class Call:
    """Entries, and all that their operations need.

    Attributes:
        entries: float32, bfloat16 or float16[d].
        towards: What brings entries to integers.
        back: What brings them back.
        quantizer: Of a rank's integers.
        ranks: That sums may be of.
        finish: Of these sums.
    """

    entries: Tensor
    towards: Blocks
    back: Blocks
    quantizer: Quantizer
    ranks: int
    finish: Finish

    @classmethod
    def of(
        cls, entries: Tensor, log_block: int, quantizer: Quantizer, ranks: int, *, mean: bool
    ) -> "Call":
        """Return a call on as many blocks as the entries need, with factors of all sizes."""
        count = max(1, -(-entries.numel() // (1 << log_block)))
        exponent = torch.tensor([0.0, 100.0, -100.0]).repeat(count)[:count]
        scale = 2.0 ** (exponent - log_block / 2) * (quantizer.top / 6)
        inverse = 2.0 ** -(exponent + log_block / 2) * (3 / quantizer.top)
        inverse[3::5] = torch.nan
        first_unit, signs = 77, 2**63 + 5
        return cls(
            entries,
            Blocks(log_block, first_unit, signs, 2.0**-exponent, scale),
            Blocks(log_block, first_unit, signs, 2.0**exponent, inverse),
            quantizer,
            ranks,
            Finish(
                quantizer.top * ranks,
                float(ranks) if mean else 1.0,
                torch.finfo(entries.dtype).max if mean else float("inf"),
            ),
        )


def everything(c: Call) -> Iterator[tuple[str, Tensor]]:
    """Run every operation where the call's tensors are; yield the last kernel and what it wrote."""
    device, top = c.entries.device, c.quantizer.top
    units, most = c.towards.units, c.quantizer.top * c.ranks
    yield "energies", ops.energies(c.entries)
    codes = torch.full((c.towards.numel,), 1, dtype=integer_dtype(most), device=device)
    ops.quantize(c.entries, c.towards, c.quantizer, codes)
    yield "mix" if c.towards.log_block > 8 else "rotate", codes.clone()

    def payload(bits: int) -> Tensor:
        return torch.full((payload_bytes(units, bits),), 255, dtype=torch.uint8, device=device)

    own, wide = width_of(top), width_of(most)
    sent = payload(own)
    ops.pack(codes, own, sent)
    yield "carry", sent
    if c.ranks > 1:
        again = payload(wide)
        ops.repack(sent, codes, (own, wide), again)
        yield "carry", again
        ops.unpack(sent, own, codes, add=True)
        yield "carry", codes.clone()
        summed = torch.zeros_like(codes)
        ops.unpack(again, wide, summed)
        assert torch.equal(summed, codes), "a fused step is its parts"
    out = torch.full_like(c.entries, -7.0)
    ops.dequantize(codes, c.back, c.finish, out)
    yield "rotate_back", out
