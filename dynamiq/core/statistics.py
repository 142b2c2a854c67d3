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


class StatisticsEncoding(DenseEncoding):
    """Sums or maxima of float32[k], sent as bfloat16 or float32, accumulated in float32.

    The owner's bytes are what every rank decodes, so all ranks end with the same bits.
    """

    reduction: Literal["sum", "max"]

    def __init__(self, statistics: Statistics, world_size: int, call: Call) -> None:
        """Lay the statistics out over the ranks."""
        super().__init__(Layout(statistics.values.numel(), world_size), call)
        self.reduction = statistics.reduction
        self.wire_dtype = torch.bfloat16 if statistics.format == "bf16" else torch.float32

    def value_bytes(self, count: int, message: Message) -> int:
        """Two or four bytes each."""
        return count * self.wire_dtype.itemsize

    def write_values(self, values: Tensor, message: Message, entry: int, out: Tensor) -> None:
        """Round stochastically to bfloat16, or copy float32.

        Rounding to nearest would lose a long ring's late contributions (DynamiQ §3.1 is silent;
        measured: 5 % of the true sum left at 8192 ranks).
        """
        if self.wire_dtype is torch.bfloat16:
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
