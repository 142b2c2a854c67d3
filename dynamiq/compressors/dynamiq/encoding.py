"""One call of DynamiQ: what the reduced statistics decide, and the work that follows from it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.allocation import threshold_cuts
from dynamiq.compressors.dynamiq.geometry import Capacities, Supergroups
from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.core.arithmetic import divide
from dynamiq.core.compressor import Encoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.kernels import ops
from dynamiq.kernels.operands import Bucket, Result, Values, entries_of, is_direct
from dynamiq.kernels.wire import SUPERGROUP, Address, Quantizer, Tiles

_HUGE_ENERGY = 2.0**100
_TINY_ENERGY = 2.0**-100
_LEAST_CENTRED_SHARE = 2.0**-7


@dataclass
class Work:
    """One rank's part: nothing is copied before it must be.

    A chunk's first payload, and its own entries, are read from the bucket in energy order, and a
    finished chunk is written there; only a chunk that several payloads are added to needs memory.

    Attributes:
        own: This rank's entries.
        out: Where finished tiles go.
        dtype: Of the result in the end, for which ``out`` may stand in.
        sums: By chunk, float32[tiles, size, 256] in energy order.
        held: By chunk, the tiles that have sums.
        finished: By chunk, the tiles that are in ``out``.
    """

    own: Values
    out: Tensor
    dtype: torch.dtype
    sums: dict[int, Tensor] = field(default_factory=dict)
    held: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    finished: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

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
    """Order, widths, centring and range of one call.

    Attributes:
        energies: float64[n * p], what the allocation saw; 0 for supergroups that are zero or
            non-finite on any rank, -1 for padding.
        cuts: int64[n, tiles, widths], supergroups per tile with at least each width.
    """

    def __init__(
        self,
        statistics: Tensor,
        layout: Layout,
        call: Call,
        quantizer: Quantizer,
        supergroup_budget: float,
        centred: bool,
    ) -> None:
        """Decide order, widths, centring and range.

        Args:
            statistics: float32[2 u], energies and means summed over ranks.
            layout: In units of 256.
            call: Its address.
            quantizer: Levels and roundings.
            supergroup_budget: Bytes per supergroup for codes and scales.
            centred: Whether the allocation uses the energy that centring leaves.
        """
        self.layout = layout
        self.call = call
        self.quantizer = quantizer
        self._deal = Deal.of(layout)
        self.positions = self._deal.tiles
        self._capacities = Capacities.of(
            self._deal, quantizer.widths, supergroup_budget, statistics.device
        )
        self._decide(statistics, centred)

    def _decide(self, statistics: Tensor, centred: bool) -> None:
        n, device = self.layout.world_size, statistics.device
        supergroups = Supergroups.of(self.layout, device)
        counts, real = supergroups.counts, supergroups.real
        energy = torch.full(counts.shape, -1.0, dtype=torch.float32, device=device)
        mean = torch.zeros(counts.shape, dtype=torch.float32, device=device)
        energy[real], mean[real] = statistics.view(2, -1)
        mean = divide(mean, n)
        contaminated = ~energy.isfinite()
        energy = torch.where(contaminated, 0.0, energy)
        # Range: F alone decides, so that all ranks agree (a power of two is exact).
        self._factor = torch.ones_like(energy)
        self._factor[energy >= _HUGE_ENERGY] = 2.0**-80
        self._factor[(energy > 0) & (energy < _TINY_ENERGY)] = 2.0**80
        self._shift = torch.where(energy > 0, mean * self._factor, 0.0)
        self._offset = self._shift * (n / self.call.divisor)
        self._offset[contaminated] = torch.nan
        self.energies = energy.double()
        if centred:
            left = self.energies - n * counts * mean.double().square()
            left = torch.maximum(left, self.energies * _LEAST_CENTRED_SHARE)
            self.energies = torch.where(self.energies > 0, left, self.energies)
        self._units = self._deal.units(self.energies)
        ordered = self.energies[self._units.clamp(min=0).view(-1)].view(self._units.shape)
        ordered = torch.where(self._units >= 0, ordered, 0.0).flatten(0, 1)
        room = self._capacities.offsets.diff()
        cuts = threshold_cuts(ordered, room, self.quantizer.widths)
        self.cuts = cuts.view(n, self._deal.tiles, -1)

    def payload_bytes(self, message: Message, positions: range) -> int:
        """The capacity of the tiles."""
        first = message.chunk * self._deal.tiles
        return sum(self._capacities.nbytes[first + positions.start : first + positions.stop])

    def load(self, x: Tensor, rank: int, out: Tensor) -> Work:
        """Copy nothing that kernels can read, and write, through the energy order."""
        entries = entries_of(x)
        if is_direct(out):
            target = out
        elif entries is not x and (entries.dtype, x.shape) == (torch.float32, out.shape):
            target = entries  # as if x were out
        else:
            target = _stand_in(out)
        own = Values(self._bucket(entries, 0), self._factor, self._shift)
        return Work(own, target, out.dtype)

    def compress(self, work: Work, message: Message, positions: range, out: Tensor) -> None:
        """See :func:`dynamiq.kernels.ops.compress`."""
        values = work.values(message.chunk, positions)
        tiles = self._tiles(message, positions)
        ops.compress(values, tiles, self.quantizer, self._address(message), out)

    def decompress(self, payload: Tensor, work: Work, message: Message, positions: range) -> None:
        """See :func:`dynamiq.kernels.ops.decompress`."""
        chunk = message.chunk
        work.release(chunk, positions)
        work.finished[chunk].update(positions)
        result = self._result(work.out, None, work.dtype)
        ops.decompress(payload, result, self._tiles(message, positions), self.quantizer)

    def decompress_accumulate(
        self, payload: Tensor, work: Work, message: Message, positions: range
    ) -> None:
        """See :func:`dynamiq.kernels.ops.decompress_accumulate`."""
        chunk, device = message.chunk, payload.device
        if chunk not in work.sums:
            shape = (self._deal.tiles, self._deal.size, SUPERGROUP)
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
        """See :func:`dynamiq.kernels.ops.decompress_accumulate_recompress`."""
        values = work.values(incoming.chunk, positions)
        tiles = self._tiles(incoming, positions), self._tiles(outgoing, positions)
        address = self._address(outgoing)
        ops.decompress_accumulate_recompress(payload, values, tiles, self.quantizer, address, out)
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
            for tiles in work.unfinished(c, self._deal.tiles):
                units = self._units[c, tiles.start : tiles.stop]
                ops.store(work.values(c, tiles), units, result)
        if target is not out:
            out.copy_(target)

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
        return Result(bucket, self._factor, self._offset, float(divisor), limit)

    def _tiles(self, message: Message, positions: range) -> Tiles:
        here = slice(positions.start, positions.stop)
        first = message.chunk * self._deal.tiles
        return Tiles(
            self._units[message.chunk, here],
            self.cuts[message.chunk, here],
            self._capacities.offsets[first + positions.start : first + positions.stop + 1],
            self.payload_bytes(message, positions),
        )

    def _address(self, message: Message) -> Address:
        n = self.layout.world_size
        return Address(self.call.seed, self.call.number, message.hop, message.sender, n)


def _stand_in(out: Tensor) -> Tensor:
    """Return memory for results that kernels cannot write to out."""
    return torch.empty(out.shape, dtype=torch.float32, device=out.device)
