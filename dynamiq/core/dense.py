"""Encodings whose working buffer is the padded bucket itself, in contiguous chunks.

The shortest way to a new format is :class:`DenseEncoding`: say how many bytes some entries take and
how they are written and read; loading, adding and storing are here.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from dynamiq.core.arithmetic import divide, rounded
from dynamiq.core.compressor import Encoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message


class PaddedEncoding(Encoding[Tensor]):
    """``work`` is float32[n, p * unit], the padded bucket: how it is loaded and stored."""

    work_dtype = torch.float32
    divisor: float
    """What :meth:`store` divides by."""

    def __init__(self, layout: Layout, call: Call) -> None:
        """Bind the encoding to a layout and a call."""
        self.layout = layout
        self.call = call
        self.positions = layout.positions
        self.divisor = call.divisor

    def load(self, x: Tensor, rank: int, out: Tensor) -> Tensor:
        """Copy x[d] into the padded bucket."""
        return self.layout.pad(x, self.work_dtype)

    def store(self, work: Tensor, out: Tensor, chunk: int | None = None) -> None:
        """Divide and copy out."""
        if chunk is not None:
            work = work[chunk, : self.layout.slice_numel(chunk)]
        result = divide(work, self.divisor)
        limit = torch.finfo(out.dtype).max
        if self.call.divisor > 1 and limit < torch.finfo(result.dtype).max:
            # A mean lies within the dtype's range; its rounded value may not.
            result = torch.where(result.isfinite(), result.clamp(-limit, limit), result)
        result = rounded(result, out.dtype)
        if chunk is None:
            self.layout.unpad(result, out)
        else:
            out.copy_(result)

    def _span(self, chunk: int, positions: range) -> tuple[int, int]:
        count = self.layout.slice_numel(chunk)
        unit = self.layout.unit
        return min(positions.start * unit, count), min(positions.stop * unit, count)


class DenseEncoding(PaddedEncoding):
    """Padding is never sent.

    A subclass gives :meth:`value_bytes`, :meth:`write_values` and :meth:`read_values`.
    """

    @abstractmethod
    def value_bytes(self, count: int, message: Message) -> int:
        """Return how many bytes ``count`` entries take (whole units but for a chunk's tail)."""

    @abstractmethod
    def write_values(self, values: Tensor, message: Message, entry: int, out: Tensor) -> None:
        """Write float32[count] to out: uint8[value_bytes(count, message)].

        ``entry`` is the index of the first one in the padded bucket.
        """

    @abstractmethod
    def read_values(self, payload: Tensor, message: Message, count: int) -> Tensor:
        """Return float32[count] from a payload."""

    def accumulate(self, own: Tensor, received: Tensor) -> None:
        """Add received values to own values, in place."""
        own.add_(received)

    def payload_bytes(self, message: Message, positions: range) -> int:
        """Bytes of the true entries in these positions."""
        start, stop = self._span(message.chunk, positions)
        return self.value_bytes(stop - start, message)

    def compress(self, work: Tensor, message: Message, positions: range, out: Tensor) -> None:
        """Write the true entries of the chunk."""
        start, stop = self._span(message.chunk, positions)
        if start == stop:
            return
        entry = message.chunk * self.layout.chunk_numel + start
        self.write_values(work[message.chunk, start:stop], message, entry, out)

    def decompress(self, payload: Tensor, work: Tensor, message: Message, positions: range) -> None:
        """Replace the true entries of the chunk."""
        start, stop = self._span(message.chunk, positions)
        if start == stop:
            return
        work[message.chunk, start:stop] = self.read_values(payload, message, stop - start)

    def decompress_accumulate(
        self, payload: Tensor, work: Tensor, message: Message, positions: range
    ) -> None:
        """Accumulate onto the true entries of the chunk."""
        start, stop = self._span(message.chunk, positions)
        if start == stop:
            return
        received = self.read_values(payload, message, stop - start)
        self.accumulate(work[message.chunk, start:stop], received)
