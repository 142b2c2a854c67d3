"""A homomorphic sum of integers in a rotated domain, as THC (NSDI'24) has it."""

from typing import Literal

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.arithmetic import rounded
from dynamiq.core.compressor import Compressor, Encoding, State, Statistics
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.randomness import BLOCK, Stream
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule

SIGNS = 101
"""A stream of its own for the random signs."""
REACH = 4.0
"""Rotated entries beyond this many standard deviations are clamped."""


@compressor_registry.register
class RotatedIntegers(Compressor):
    """Rotates the bucket (with bounds, each slice), rounds to integers once, and sums integers.

    The largest norm over ranks fixes one step size for all ranks, so that codes can be added
    without decoding; a sum of k ranks needs a wider integer than one rank's entry.
    Contamination unit: the bucket, or the slice.
    """

    kind: Literal["probe-integers"] = "probe-integers"
    top: int = 100
    """The largest magnitude of one rank's integers."""

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics:
        """The Euclidean norm of every rotated part."""
        norms = [x[start:stop].double().norm() for start, stop in parts(layout)]
        return Statistics(torch.stack(norms).float(), "max")

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "RotatedIntegersEncoding":
        return RotatedIntegersEncoding(statistics, layout, call, self.top)


def parts(layout: Layout) -> list[tuple[int, int]]:
    """Return what is rotated together: the bucket, or each slice when bounds are given."""
    if layout.bounds is None:
        return [(0, layout.numel)]
    return [layout.slice_bounds(chunk) for chunk in range(layout.world_size)]


class RotatedIntegersEncoding(Encoding[Tensor]):
    """``work`` is int32[n, p]: sums of codes of the rotated entries, which are more than d."""

    def __init__(self, norms: Tensor, layout: Layout, call: Call, top: int) -> None:
        self.layout, self.call, self.top = layout, call, top
        self.parts = parts(layout)
        self.sizes = [_power_of_two(stop - start) for start, stop in self.parts]
        if layout.bounds is None:
            self.positions = -(-self.sizes[0] // layout.world_size)
        else:
            self.positions = max(self.sizes)
        sizes = torch.tensor(self.sizes, device=norms.device).clamp(min=1)
        self.steps = norms * (REACH / top) / sizes.sqrt()

    def payload_bytes(self, message: Message, positions: range) -> int:
        first, last = self._span(message.chunk, positions)
        return (last - first) * self._width(message.summed)

    def load(self, x: Tensor, rank: int, out: Tensor) -> Tensor:
        work = torch.zeros(
            self.layout.world_size, self.positions, dtype=torch.int32, device=x.device
        )
        for i, (start, stop) in enumerate(self.parts):
            rotated = torch.zeros(self.sizes[i], device=x.device)
            rotated[: stop - start] = x[start:stop]
            rotated = hadamard(rotated * self._signs(i)) / self._safe(self.steps[i])
            u = randomness.uniform(self._words(Stream.ENTRY, rank, i, self.sizes[i]))
            codes = (rotated + u).floor_().nan_to_num_(0.0).clamp_(-self.top, self.top)
            self._part(work, i)[: self.sizes[i]] = codes.to(torch.int32)
        return work

    def compress(self, work: Tensor, message: Message, positions: range, out: Tensor) -> None:
        first, last = self._span(message.chunk, positions)
        codes = work[message.chunk, first:last] + self.top * message.summed
        width = self._width(message.summed)
        out.copy_(codes.view(torch.uint8).view(-1, 4)[:, :width].reshape(-1))

    def decompress(self, payload: Tensor, work: Tensor, message: Message, positions: range) -> None:
        first, last = self._span(message.chunk, positions)
        work[message.chunk, first:last] = self._read(payload, message)

    def decompress_accumulate(
        self, payload: Tensor, work: Tensor, message: Message, positions: range
    ) -> None:
        first, last = self._span(message.chunk, positions)
        work[message.chunk, first:last] += self._read(payload, message)

    def store(self, work: Tensor, out: Tensor, chunk: int | None = None) -> None:
        if chunk is not None:
            out.copy_(rounded(self._values(work, chunk), out.dtype))
            return
        for i, (start, stop) in enumerate(self.parts):
            out[start:stop] = rounded(self._values(work, i), out.dtype)

    def _values(self, work: Tensor, i: int) -> Tensor:
        start, stop = self.parts[i]
        rotated = self._part(work, i)[: self.sizes[i]] * self.steps[i]
        values = hadamard(rotated) * self._signs(i) / self.call.divisor
        return values[: stop - start]

    def _part(self, work: Tensor, i: int) -> Tensor:
        return work.view(-1) if self.layout.bounds is None else work[i]

    def _read(self, payload: Tensor, message: Message) -> Tensor:
        width = self._width(message.summed)
        wide = torch.zeros(payload.numel() // width, 4, dtype=torch.uint8, device=payload.device)
        wide[:, :width] = payload.view(-1, width)
        return wide.view(torch.int32).view(-1) - self.top * message.summed

    def _width(self, summed: int) -> int:
        """Bytes that hold 0 to 2 · top · summed."""
        return -(-(2 * self.top * summed).bit_length() // 8)

    def _span(self, chunk: int, positions: range) -> tuple[int, int]:
        if self.layout.bounds is None:
            count = max(0, min(self.positions, self.sizes[0] - chunk * self.positions))
        else:
            count = self.sizes[chunk]
        return min(positions.start, count), min(positions.stop, count)

    def _signs(self, i: int) -> Tensor:
        """The same on all ranks."""
        return (self._words(SIGNS, 0, i, self.sizes[i]) & 1).float() * 2.0 - 1.0

    def _words(self, stream: int, sender: int, i: int, count: int) -> Tensor:
        key = randomness.key(self.call.seed, self.call.number, stream, sender, i)
        blocks = torch.arange(-(-count // BLOCK), device=self.steps.device)
        return randomness.words(key, blocks).view(-1)[:count]

    @staticmethod
    def _safe(step: Tensor) -> Tensor:
        return torch.where(step == 0, 1.0, step)


def hadamard(x: Tensor) -> Tensor:
    """Return the orthonormal Walsh-Hadamard transform of float32[2^k], its own inverse."""
    size = x.numel()
    half = 1
    while half < size:
        pairs = x.view(-1, 2, half)
        x = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], dim=1).view(-1)
        half *= 2
    return x / max(size, 1) ** 0.5


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0
