"""Only what is not zero: a payload size that depends on the data of all ranks, as OmniReduce's."""

from typing import Literal

import torch
from torch import Tensor

from dynamiq.core.arithmetic import rounded
from dynamiq.core.compressor import Compressor, Encoding, State, Statistics
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule


@compressor_registry.register
class NonZeroBlocks(Compressor):
    """Sends the blocks in which any rank has a non-zero, as FP32; the sums are exact FP32 sums.

    Sizes depend on the data: ``encode`` waits for the reduced bitmap. Contamination unit: the
    entry.
    """

    kind: Literal["probe-blocks"] = "probe-blocks"
    block: int = 8

    def unit(self, numel: int, world_size: int) -> int:
        return self.block

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics:
        """1 for every block that holds anything (exact in BF16)."""
        blocks = layout.pad(x != 0, torch.bool).view(-1, self.block)
        return Statistics(blocks.any(dim=1).float(), "max", "bf16")

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "NonZeroBlocksEncoding":
        return NonZeroBlocksEncoding(statistics > 0, layout, call)


class NonZeroBlocksEncoding(Encoding[Tensor]):
    """``work`` is float32[n, p, block]; a position is a place in a chunk's list of sent blocks."""

    def __init__(self, sent: Tensor, layout: Layout, call: Call) -> None:
        self.layout, self.call = layout, call
        rows = sent.view(layout.world_size, layout.positions)
        self.blocks = [row.nonzero()[:, 0] for row in rows]
        self.positions = max((blocks.numel() for blocks in self.blocks), default=0)

    def payload_bytes(self, message: Message, positions: range) -> int:
        return self._here(message, positions).numel() * self.layout.unit * 4

    def load(self, x: Tensor, rank: int, out: Tensor) -> Tensor:
        padded = self.layout.pad(x, torch.float32)
        return padded.view(self.layout.world_size, self.layout.positions, self.layout.unit)

    def compress(self, work: Tensor, message: Message, positions: range, out: Tensor) -> None:
        values = work[message.chunk].index_select(0, self._here(message, positions))
        out.copy_(values.view(-1).view(torch.uint8))

    def decompress(self, payload: Tensor, work: Tensor, message: Message, positions: range) -> None:
        work[message.chunk][self._here(message, positions)] = self._read(payload)

    def decompress_accumulate(
        self, payload: Tensor, work: Tensor, message: Message, positions: range
    ) -> None:
        here = self._here(message, positions)
        work[message.chunk].index_add_(0, here, self._read(payload))

    def store(self, work: Tensor, out: Tensor, chunk: int | None = None) -> None:
        values = rounded((work / self.call.divisor).flatten(1), out.dtype)
        if chunk is None:
            self.layout.unpad(values, out)
        else:
            out.copy_(values[chunk, : self.layout.slice_numel(chunk)])

    def _here(self, message: Message, positions: range) -> Tensor:
        return self.blocks[message.chunk][positions.start : positions.stop]

    def _read(self, payload: Tensor) -> Tensor:
        return payload.view(torch.float32).view(-1, self.layout.unit)
