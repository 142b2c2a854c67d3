"""One call of DynamiQ: the work that follows from what its statistics decide."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.decision import Decision, Problem
from dynamiq.compressors.dynamiq.memory import Past
from dynamiq.compressors.dynamiq.spectrum import Spectrum
from dynamiq.compressors.supergroups import Supergroups
from dynamiq.core import randomness
from dynamiq.core.arithmetic import rounded
from dynamiq.core.compressor import Encoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.randomness import Stream
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.operands import Bucket, Result, Values, entries_of, is_direct
from dynamiq.kernels.supergroups.wire import SUPERGROUP, Address, Quantizer, Tiles


@dataclass
class Work:
    """One rank's part: nothing is copied before it must be.

    A chunk's first payload, and its own entries, are read from the bucket in energy order, and a
    finished chunk is written there; only a chunk that several payloads are added to needs memory.

    Attributes:
        rank: Whose part.
        own: This rank's entries.
        out: Where finished tiles go.
        dtype: Of the result in the end, for which ``out`` may stand in.
        sums: By chunk, float32[tiles, size, 256] in energy order.
        held: By chunk, the tiles that have sums.
        finished: By chunk, the tiles that are in ``out``.
        stored: The whole result, once it is there: all entries, or those of one chunk.
    """

    rank: int
    own: Values
    out: Tensor
    dtype: torch.dtype
    sums: dict[int, Tensor] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    finished: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    stored: Tensor | None = None

    def values(self, chunk: int, tiles: range) -> Values:
        """Return partial sums: own entries where nothing was added yet."""
        held = self.held[chunk]
        if held.isdisjoint(tiles):
            return self.own
        assert held.issuperset(tiles), "the segments of a call are always the same"
        return replace(self.own, sums=self.sums[chunk][tiles.start : tiles.stop])

    def unfinished(self, chunk: int, tiles: int) -> Iterator[range]:
        """Yield the unfinished ones of a chunk's tiles, in ranges that have sums or have none."""
        held, finished = self.held[chunk], self.finished[chunk]
        alike = groupby(range(tiles), lambda tile: (tile in finished, tile in held))
        for (done, _), group in alike:
            if not done:
                places = list(group)
                yield range(places[0], places[-1] + 1)

    def release(self, chunk: int, tiles: range) -> None:
        """Give up sums that will not be read again."""
        self.held[chunk].difference_update(tiles)
        if not self.held[chunk]:
            self.sums.pop(chunk, None)


class DynamiQEncoding(Encoding[Work]):
    """Order, widths, centring, range and rotation of one call.

    Attributes:
        spectrum: What the reduced statistics say.
        decision: What follows from it.
        past: What was known from earlier calls.
        predicted_vnmse: The modelled error of the sum relative to its energy, of dithered codes,
            whose errors are known; None for others. Independent of this
            call's random numbers. Waits for the device.
    """

    def __init__(
        self, problem: Problem, spectrum: Spectrum, past: Past, layout: Layout, call: Call
    ) -> None:
        """Decide.

        Args:
            problem: What is known before the data.
            spectrum: What the statistics say.
            past: What earlier calls have told.
            layout: In units of 256.
            call: Its address.
        """
        self.layout = layout
        self.call = call
        self.spectrum = spectrum
        self.past = past
        self.decision = Decision(problem, spectrum, past.memory)
        self.quantizer: Quantizer = problem.compressor.quantizer
        self.positions = problem.deal.tiles
        self._problem = problem
        self._signs = None
        if problem.compressor.rotation is not None:
            self._signs = randomness.key(call.seed, call.number, Stream.SIGN)

    @property
    def predicted_vnmse(self) -> float | None:
        """See above."""
        return self.decision.predicted_vnmse() if self.quantizer.rounding == "dithered" else None

    def widths_of_hop(self, hop: int) -> Tensor:
        """Return int64[n, tiles, size]: the bits of every supergroup at a hop, 0 for none."""
        n, deal = self.layout.world_size, self._problem.deal
        place = torch.arange(deal.size, device=self.decision.units.device)
        widths = torch.tensor((0, *self.quantizer.widths), device=place.device)
        cuts = torch.stack(
            [self.decision.cuts(hop, chunk, slice(0, deal.tiles)) for chunk in range(n)]
        )
        return widths[(place < cuts[..., None]).sum(2)]

    def payload_bytes(self, message: Message, positions: range) -> int:
        """The capacity of the tiles."""
        return self._problem.payload_bytes(self.decision.totals, message, positions)

    def load(self, x: Tensor, rank: int, out: Tensor) -> Work:
        """Copy nothing that kernels can read, and write, through the energy order."""
        entries = entries_of(x)
        if is_direct(out):
            target = out
        elif entries is not x and (entries.dtype, x.shape) == (torch.float32, out.shape):
            target = entries  # as if x were out
        else:
            target = _stand_in(out)
        own = Values(
            self._bucket(entries, 0), self.spectrum.factor, self.spectrum.shift, signs=self._signs
        )
        return Work(rank, own, target, out.dtype)

    def compress(self, work: Work, message: Message, positions: range, out: Tensor) -> None:
        """See :func:`dynamiq.kernels.supergroups.ops.compress`."""
        values = work.values(message.chunk, positions)
        tiles = self._tiles(message, positions)
        ops.compress(values, tiles, self.quantizer, out)

    def decompress(self, payload: Tensor, work: Work, message: Message, positions: range) -> None:
        """See :func:`dynamiq.kernels.supergroups.ops.decompress`."""
        chunk = message.chunk
        work.release(chunk, positions)
        work.finished[chunk].update(positions)
        result = self._result(work.out, None, work.dtype)
        ops.decompress(payload, result, self._tiles(message, positions), self.quantizer)

    def decompress_accumulate(
        self, payload: Tensor, work: Work, message: Message, positions: range
    ) -> None:
        """See :func:`dynamiq.kernels.supergroups.ops.decompress_accumulate`."""
        chunk, device = message.chunk, payload.device
        if chunk not in work.sums:
            shape = (self.positions, self._problem.deal.size, SUPERGROUP)
            work.sums[chunk] = torch.empty(shape, dtype=torch.float32, device=device)
        sums = work.sums[chunk][positions.start : positions.stop]
        tiles = self._tiles(message, positions)
        values = work.values(chunk, positions)
        ops.decompress_accumulate(payload, values, sums, tiles, self.quantizer)
        work.held[chunk].update(positions)

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: Work,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        """See :func:`dynamiq.kernels.supergroups.ops.decompress_accumulate_recompress`."""
        values = work.values(incoming.chunk, positions)
        tiles = self._tiles(incoming, positions), self._tiles(outgoing, positions)
        ops.decompress_accumulate_recompress(payload, values, tiles, self.quantizer, out)
        work.release(incoming.chunk, positions)

    def store(self, work: Work, out: Tensor, chunk: int | None = None) -> None:
        """Write the sums of unfinished tiles; the others are where they belong already."""
        target = out if is_direct(out) else work.out
        if target.shape != out.shape:
            target = _stand_in(out)
        if target is not work.out and (chunk is None or work.finished[chunk]):
            target.copy_(self._finished(work, chunk))
        result = self._result(target, chunk, out.dtype)
        for c in range(self.layout.world_size) if chunk is None else (chunk,):
            for tiles in work.unfinished(c, self.positions):
                units = self.decision.units[c, tiles.start : tiles.stop]
                ops.store(work.values(c, tiles), units, result)
        if target is not out:
            out.copy_(rounded(target, out.dtype))
        work.stored = out

    def _finished(self, work: Work, chunk: int | None) -> Tensor:
        """Return the part of early results that belongs to a chunk, or all of them."""
        if chunk is None or work.out.numel() != self.layout.numel:
            return work.out
        start, stop = self.layout.slice_bounds(chunk)
        return work.out[start:stop]

    def _bucket(self, entries: Tensor, origin: int) -> Bucket:
        slices = Supergroups.of(self.layout, entries.device).slices
        return Bucket(entries, slices, self.layout.positions, origin)

    def _result(self, out: Tensor, chunk: int | None, dtype: torch.dtype) -> Result:
        """Return where results go, in the end as dtype: the bucket, or one chunk's entries."""
        n, divisor = self.layout.world_size, self.call.divisor
        limit = float("inf")
        if divisor == n:
            # A mean lies within the dtype's range; its quantised value may not.
            limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        origin = 0 if chunk is None else self.layout.slice_bounds(chunk)[0]
        bucket = self._bucket(out, origin)
        spectrum = self.spectrum
        return Result(bucket, spectrum.factor, spectrum.offset, float(divisor), limit, self._signs)

    def _tiles(self, message: Message, positions: range) -> Tiles:
        here = slice(positions.start, positions.stop)
        first = message.chunk * self.positions
        ends = (first + positions.start, first + positions.stop)
        call, n = self.call, self.layout.world_size
        full = self._problem.full_tile(self.decision.totals, message)
        return Tiles(
            self.decision.units[message.chunk, here],
            self.decision.cuts(message.hop, message.chunk, here),
            self._problem.capacities.offsets(full, *ends),
            self.payload_bytes(message, positions),
            Address(call.seed, call.number, message.hop, message.sender, n),
        )


def _stand_in(out: Tensor) -> Tensor:
    """Return memory for results that kernels cannot write to out."""
    return torch.empty(out.shape, dtype=torch.float32, device=out.device)
