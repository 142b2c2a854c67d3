"""One call of DynamiQ: what the reduced statistics decide, and the work that follows from it."""

from itertools import accumulate

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.allocation import capacities, threshold_cuts
from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.core.compressor import Encoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.kernels import ops
from dynamiq.kernels.wire import SUPERGROUP, Address, Quantizer, Tiles

_HUGE_ENERGY = 2.0**100
_TINY_ENERGY = 2.0**-100
_LEAST_CENTRED_SHARE = 2.0**-7


class DynamiQEncoding(Encoding[Tensor]):
    """``work`` is float32[n, tiles, size, 256]: centred, scaled partial sums in energy order.

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
        self._bytes = capacities(self._deal.counts(), quantizer.widths, supergroup_budget)
        self._decide(statistics, centred)

    def _decide(self, statistics: Tensor, centred: bool) -> None:
        n, device = self.layout.world_size, statistics.device
        counts = self.layout.true_entries().to(device)
        real = counts > 0
        energy = torch.full(real.shape, -1.0, dtype=torch.float32, device=device)
        mean = torch.zeros(real.shape, dtype=torch.float32, device=device)
        energy[real], mean[real] = statistics.view(2, -1)
        mean = mean / n
        self._contaminated = ~energy.isfinite()
        energy = torch.where(self._contaminated, 0.0, energy)
        # Range: F alone decides, so that all ranks agree (a power of two is exact).
        self._factor = torch.ones_like(energy)
        self._factor[energy >= _HUGE_ENERGY] = 2.0**-80
        self._factor[(energy > 0) & (energy < _TINY_ENERGY)] = 2.0**80
        self._shift = torch.where(energy > 0, mean * self._factor, 0.0)
        self.energies = energy.double()
        if centred:
            left = self.energies - n * counts * mean.double().square()
            left = torch.maximum(left, self.energies * _LEAST_CENTRED_SHARE)
            self.energies = torch.where(self.energies > 0, left, self.energies)
        self._units = self._deal.units(self.energies)
        ordered = self.energies[self._units.clamp(min=0).view(-1)].view(self._units.shape)
        ordered = torch.where(self._units >= 0, ordered, 0.0).flatten(0, 1)
        sizes = torch.tensor(self._bytes, dtype=torch.int64, device=device)
        cuts = threshold_cuts(ordered, sizes, self.quantizer.widths)
        self.cuts = cuts.view(n, self._deal.tiles, -1)

    def payload_bytes(self, message: Message, positions: range) -> int:
        """The capacity of the tiles."""
        first = message.chunk * self._deal.tiles
        return sum(self._bytes[first + positions.start : first + positions.stop])

    def load(self, x: Tensor, rank: int) -> Tensor:
        """Scale into range, remove the mean that all ranks share, put into energy order."""
        rows = self.layout.pad(x, torch.float32).view(-1, SUPERGROUP)
        rows.mul_(self._factor[:, None]).sub_(self._shift[:, None])
        for unit, count in self.layout.partial_units():
            rows[unit, count:] = 0.0
        places = self._units.clamp(min=0).view(-1)
        return rows.index_select(0, places).view(*self._units.shape, SUPERGROUP)

    def compress(self, work: Tensor, message: Message, positions: range, out: Tensor) -> None:
        """See :func:`dynamiq.kernels.ops.compress`."""
        tiles = self._tiles(message, positions)
        values = self._values(work, message, positions)
        ops.compress(values, tiles, self.quantizer, self._address(message), out)

    def decompress(self, payload: Tensor, work: Tensor, message: Message, positions: range) -> None:
        """See :func:`dynamiq.kernels.ops.decompress`."""
        values = self._values(work, message, positions)
        ops.decompress(payload, values, self._tiles(message, positions), self.quantizer)

    def decompress_accumulate(
        self, payload: Tensor, work: Tensor, message: Message, positions: range
    ) -> None:
        """See :func:`dynamiq.kernels.ops.decompress_accumulate`."""
        values = self._values(work, message, positions)
        ops.decompress_accumulate(payload, values, self._tiles(message, positions), self.quantizer)

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: Tensor,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        """See :func:`dynamiq.kernels.ops.decompress_accumulate_recompress`."""
        ops.decompress_accumulate_recompress(
            payload,
            self._values(work, incoming, positions),
            (self._tiles(incoming, positions), self._tiles(outgoing, positions)),
            self.quantizer,
            self._address(outgoing),
            out,
        )

    def store(self, work: Tensor, out: Tensor, chunk: int | None = None) -> None:
        """Undo order, centring and range, divide, and make contaminated supergroups NaN."""
        n, p = self.layout.world_size, self.layout.positions
        flat = self._units.view(-1)
        places = torch.zeros(n * p, dtype=torch.int64, device=work.device)
        held = (flat >= 0).nonzero()[:, 0]
        places[flat[held]] = held
        units = slice(None) if chunk is None else slice(chunk * p, (chunk + 1) * p)
        rows = work.view(-1, SUPERGROUP).index_select(0, places[units])
        divisor = self.call.divisor
        rows.div_(divisor).add_((self._shift[units] * (n / divisor))[:, None])
        rows.div_(self._factor[units, None])
        if divisor == n:
            # A mean lies within the dtype's range; its quantised value may not.
            limit = min(torch.finfo(out.dtype).max, torch.finfo(rows.dtype).max)
            rows.clamp_(-limit, limit)
        rows[self._contaminated[units]] = torch.nan
        if chunk is None:
            self.layout.unpad(rows.view(n, -1), out)
        else:
            out.copy_(rows.view(-1)[: out.numel()])

    def _values(self, work: Tensor, message: Message, positions: range) -> Tensor:
        return work[message.chunk, positions.start : positions.stop]

    def _tiles(self, message: Message, positions: range) -> Tiles:
        here = slice(positions.start, positions.stop)
        first = message.chunk * self._deal.tiles
        sizes = self._bytes[first + positions.start : first + positions.stop]
        return Tiles(
            self._units[message.chunk, here],
            self.cuts[message.chunk, here],
            tuple(accumulate(sizes, initial=0)),
        )

    def _address(self, message: Message) -> Address:
        n = self.layout.world_size
        return Address(self.call.seed, self.call.number, message.hop, message.sender, n)
