"""One call of OmniReduce: a dense all-reduce of the union of blocks."""

import torch
from torch import Tensor

from dynamiq.compressors.omnireduce.union import BLOCK, Union
from dynamiq.compressors.uncompressed import UncompressedEncoding
from dynamiq.core.compressor import Encoding, State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message


class OmniReduceEncoding(Encoding[Tensor]):
    """An uncompressed call whose tensor is the union of blocks: its ``work`` and its bytes.

    Attributes:
        union: The blocks.
        next_state: The state after the call.
    """

    def __init__(
        self, union: Union, layout: Layout, call: Call, dtype: torch.dtype, next_state: State
    ) -> None:
        """Bind the union to a call.

        Args:
            union: The blocks.
            layout: Of the whole tensor.
            call: Its address.
            dtype: Of entries on the wire.
            next_state: The state after the call.
        """
        self.union = union
        self.next_state = next_state
        bounds = union.bounds(layout)
        compact = Layout(bounds[-1], layout.world_size, BLOCK, bounds)
        self._dense = UncompressedEncoding(compact, call, dtype)
        self.positions = self._dense.positions

    def payload_bytes(self, message: Message, positions: range) -> int:
        """Of the entries that are sent: no padding."""
        return self._dense.payload_bytes(message, positions)

    def load(self, x: Tensor, rank: int, out: Tensor) -> Tensor:
        """Copy the union out of x[d]."""
        values = torch.empty(self._dense.layout.numel, dtype=x.dtype, device=x.device)
        for part, here, entries in self.union.places(values, x):
            part.gather(entries, here)
        return self._dense.load(values, rank, out)

    def compress(self, work: Tensor, message: Message, positions: range, out: Tensor) -> None:
        """Round to nearest."""
        self._dense.compress(work, message, positions, out)

    def decompress(self, payload: Tensor, work: Tensor, message: Message, positions: range) -> None:
        """Widen."""
        self._dense.decompress(payload, work, message, positions)

    def decompress_accumulate(
        self, payload: Tensor, work: Tensor, message: Message, positions: range
    ) -> None:
        """Widen and add."""
        self._dense.decompress_accumulate(payload, work, message, positions)

    def store(self, work: Tensor, out: Tensor, chunk: int | None = None) -> None:
        """Write the union to its places, and zeros elsewhere."""
        layout = self._dense.layout
        numel = layout.numel if chunk is None else layout.slice_numel(chunk)
        values = torch.empty(numel, dtype=out.dtype, device=out.device)
        self._dense.store(work, values, chunk)
        if chunk is not None:
            self.union.parts[chunk].scatter(values, out)
            return
        for part, here, entries in self.union.places(values, out):
            part.scatter(here, entries)
