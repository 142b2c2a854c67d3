"""How statistics are reduced: the small collective before the main one, on the same schedule."""

from typing import Literal

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.compressor import Statistics
from dynamiq.core.dense import DenseEncoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.randomness import BLOCK, Stream

_BYTE_BITS = 8
_WIRE_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "bit": torch.uint8}


class StatisticsEncoding(DenseEncoding):
    """Sums or maxima of float32[k], sent as bfloat16, float32 or bits.

    The owner's bytes are what every rank decodes, so all ranks end with the same bits.
    """

    reduction: Literal["sum", "max"]

    def __init__(self, statistics: Statistics, world_size: int, call: Call) -> None:
        """Lay the statistics out over the ranks."""
        unit = _BYTE_BITS if statistics.format == "bit" else 1
        super().__init__(Layout(statistics.values.numel(), world_size, unit), call)
        self.reduction = statistics.reduction
        self.wire_dtype = _WIRE_DTYPES[statistics.format]

    def load(self, x: Tensor, rank: int, out: Tensor) -> Tensor:
        """Copy x[k]; of bits only whether they are 0, so that a maximum is what any rank says."""
        return super().load(x != 0 if self.wire_dtype is torch.uint8 else x, rank, out)

    def value_bytes(self, count: int, message: Message) -> int:
        """Two or four bytes each, or an eighth of one."""
        if self.wire_dtype is torch.uint8:
            return -(-count // _BYTE_BITS)
        return count * self.wire_dtype.itemsize

    def write_values(self, values: Tensor, message: Message, entry: int, out: Tensor) -> None:
        """Round stochastically to bfloat16, copy float32, or pack bits.

        Rounding to nearest would lose a long ring's late contributions (DynamiQ §3.1 is silent;
        measured: 5 % of the true sum left at 8192 ranks).
        """
        if self.wire_dtype is torch.uint8:
            values = _packed(values != 0)
        elif self.wire_dtype is torch.bfloat16:
            first, last = entry // BLOCK, -(-(entry + values.numel()) // BLOCK)
            key = randomness.key(
                self.call.seed, self.call.number, Stream.STATISTICS, message.hop, message.sender
            )
            blocks = torch.arange(first, last, device=values.device)
            words = randomness.words(key, blocks).view(-1)[entry - first * BLOCK :]
            values = randomness.stochastic_bfloat16(values, words[: values.numel()])
        out.copy_(values.contiguous().view(torch.uint8))

    def read_values(self, payload: Tensor, message: Message, count: int) -> Tensor:
        """Widen to float32."""
        if self.wire_dtype is torch.uint8:
            return _unpacked(payload)[:count].to(torch.float32)
        return payload.view(self.wire_dtype).to(torch.float32)

    def accumulate(self, own: Tensor, received: Tensor) -> None:
        """Add, or take the maximum (NaN wins)."""
        if self.reduction == "sum":
            own.add_(received)
        else:
            torch.maximum(own, received, out=own)

    def result(self, work: Tensor) -> Tensor:
        """Return the reduced float32[k]."""
        return work.view(-1)[: self.layout.numel]


def _packed(bits: Tensor) -> Tensor:
    """Return uint8[⌈k/8⌉] of bool[k], the first bit the least significant; 0 beyond the end."""
    padded = torch.zeros(
        -(-bits.numel() // _BYTE_BITS), _BYTE_BITS, dtype=torch.uint8, device=bits.device
    )
    padded.view(-1)[: bits.numel()] = bits
    places = torch.arange(_BYTE_BITS, dtype=torch.uint8, device=bits.device)
    return (padded << places).sum(1, dtype=torch.uint8)


def _unpacked(payload: Tensor) -> Tensor:
    """Return uint8[8 m], 0 or 1, of uint8[m]."""
    places = torch.arange(_BYTE_BITS, dtype=torch.uint8, device=payload.device)
    return (payload[:, None] >> places).bitwise_and_(1).view(-1)
