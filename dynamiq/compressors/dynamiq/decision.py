"""What one call decides from its spectrum: the order of supergroups, and the bits of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from dynamiq.compressors.dynamiq.errors import band_errors, noise_peaks, roughness, shipped_errors
from dynamiq.compressors.dynamiq.geometry import Capacities
from dynamiq.compressors.dynamiq.hops import HopModel
from dynamiq.compressors.dynamiq.memory import BANDS, Memory, bands_of
from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.compressors.dynamiq.prediction import Rows, expected_noise
from dynamiq.compressors.dynamiq.spectrum import Spectrum
from dynamiq.compressors.dynamiq.worth import Widths, joint_worth, separable_worth, uniform_worth
from dynamiq.core.arithmetic import tree_sum
from dynamiq.core.message import Message
from dynamiq.kernels.allocation.ops import fill
from dynamiq.kernels.allocation.steps import Steps
from dynamiq.kernels.supergroups.wire import Quantizer, supergroup_bytes

if TYPE_CHECKING:
    from dynamiq.compressors.dynamiq.compressor import DynamiQCompressor

_OCTAVES = 24
"""Energies within a tile before anything is known: from 1 to 2^-24, as many rows to each octave."""
_EVEN = 2
"""Tiles begin at even addresses."""
Totals = tuple[tuple[int, ...], ...]
_UNIT = 2.0**50
"""Energies are summed as integers where the order of the sum must not matter."""


@dataclass(frozen=True)
class Problem:
    """What the allocation knows before a call's data: the same for all calls of a bucket.

    Attributes:
        compressor: The options.
        deal: The tiles.
        model: The schedule's hops.
        capacities: Bytes of the tiles.
    """

    compressor: "DynamiQCompressor"
    deal: Deal
    model: HopModel
    capacities: Capacities

    @cached_property
    def widths(self) -> Widths:
        """Costs of the widths, and the errors that the allocation goes by."""
        quantizer = self.compressor.quantizer
        if self.compressor.allocation == "thresholds":
            errors = tuple(4.0**-w for w in quantizer.widths)
        else:
            errors = shipped_errors(quantizer)
        nbytes = tuple(supergroup_bytes(w, quantizer.group_scales) for w in quantizer.widths)
        return Widths(nbytes, errors)

    def totals_after(self, memory: Memory) -> Totals:
        """Return the bytes of a full tile, by deal and class, of a call: known before its data."""
        return memory.totals_for(self.capacities, self.model.sent) or first_totals(self)

    def full_tile(self, totals: Totals, message: Message) -> int:
        """Return the bytes of a full tile in a message."""
        deal = 0 if self.deal.deals == 1 else message.chunk
        return totals[deal][self.model.of_hop[message.hop]]

    def payload_bytes(self, totals: Totals, message: Message, positions: range) -> int:
        """Return the capacity of a message's tiles."""
        first = message.chunk * self.deal.tiles
        ends = first + positions.start, first + positions.stop
        return self.capacities.nbytes(self.full_tile(totals, message), *ends)

    def totals(
        self, weights: Tensor, memory: Memory, full: Sequence[tuple[int, int]] | None = None
    ) -> Totals:
        """Return the bytes of a full tile that are best for a spectrum, by deal and class.

        Args:
            weights: float64[deals, r], what rows' errors count.
            memory: What is known from earlier calls.
            full: Supergroups of a full tile and its mean bytes, by deal; None for all deals.
        """
        steps = _steps(self, memory.alike(self.compressor.quantizer), weights.device)
        least, grain = self.widths.bytes[0], self.capacities.grain
        rows, mean = torch.tensor(full or self.capacities.full).to(weights.device).unbind(1)
        # Rows without energy may have some in the next call, and need room for the narrowest width.
        idle = (rows - (weights > 0).sum(1)) * least
        room = (mean - idle) * steps.transfers.sum()
        totals = (fill(weights, room[:, None], steps, shared=True) * steps.bytes).sum(2)
        totals = totals + idle[:, None]
        # What rows with energy have no use for is there for those that have none yet.
        left = mean * steps.transfers.sum() - (totals * steps.transfers).sum(1)
        totals = totals + (left // steps.transfers.sum() // _EVEN * _EVEN)[:, None]
        totals = torch.minimum(totals, rows[:, None] * self.widths.bytes[-1])
        totals = torch.maximum(totals // grain * grain, rows[:, None] * least)
        return tuple(tuple(row) for row in totals.tolist())


@lru_cache(maxsize=256)
def _steps(problem: Problem, alike: tuple[tuple[float, float], ...], device: torch.device) -> Steps:
    """Return what steps are worth and cost; a recipe that is not hop-aware has one class.

    Args:
        problem: Hops and widths.
        alike: ρ and π by band.
        device: Of the steps.
    """
    if problem.compressor.hop_aware:
        bands = [joint_worth(problem.model, problem.widths, *band) for band in alike]
        worth = torch.stack(bands, dim=2)
        transfers = [c.transfers for c in problem.model.classes[: problem.model.sent]]
    else:
        if problem.compressor.allocation == "thresholds":
            flat = torch.tensor([separable_worth(problem.widths)], dtype=torch.float64)
        else:
            flat = uniform_worth(problem.model, problem.widths, *alike[0])
        worth = flat[:, :, None].expand(-1, -1, BANDS)
        transfers = [1]
    sizes = problem.widths.bytes
    costs = [sizes[0], *(b - a for a, b in pairwise(sizes))]
    return Steps(
        worth.contiguous().to(device),
        torch.tensor(costs).to(device),
        torch.tensor(transfers).to(device),
        bands_of(problem.deal.size, device),
    )


@lru_cache(maxsize=64)
def _room(totals: tuple[tuple[int, ...], ...], classes: int, device: torch.device) -> Tensor:
    """Return int64[deals, classes], bytes of a full tile."""
    return torch.tensor([row[:classes] for row in totals], device=device)


@lru_cache(maxsize=64)
def _roughness(
    quantizer: Quantizer, shapes: tuple[float, ...], size: int, device: torch.device
) -> Tensor:
    """Return float64[size]: of each row, how much greater errors are than shipped ones."""
    by_band = roughness(quantizer, torch.tensor(shapes, dtype=torch.float64).view(BANDS, 3))
    return by_band.to(device)[bands_of(size, device)]


@lru_cache(maxsize=64)
def first_totals(problem: Problem) -> Totals:
    """Return the bytes of a full tile, by deal and class of hops, before anything is known.

    For a recipe that is not hop-aware those are always the mean ones; or else the best ones for
    energies that fall evenly.
    """
    if not problem.compressor.hop_aware:
        return tuple((mean,) * problem.model.sent for mean in problem.capacities.mean)
    # Thousands of deals are alike but for a few kinds.
    kinds = list(dict.fromkeys(problem.capacities.full))
    energy = torch.zeros(len(kinds), problem.deal.size, dtype=torch.float64)
    for kind, (count, _) in enumerate(kinds):
        for row in range(count):
            energy[kind, row] = 2.0 ** -(_OCTAVES * row // count)
    found = dict(zip(kinds, problem.totals(energy, Memory(), kinds), strict=True))
    return tuple(found[kind] for kind in problem.capacities.full)


class Decision:
    """Order and widths of one call, the same on every rank.

    Attributes:
        problem: What was known before.
        units: int64[n, tiles, size], the supergroup at every place, -1 where there is none.
        totals: Bytes of a full tile, by deal and class of hops.
    """

    def __init__(self, problem: Problem, spectrum: Spectrum, memory: Memory) -> None:
        """Sort and allocate."""
        self.problem = problem
        self.units = problem.deal.units(spectrum.energies)
        self._spectrum = spectrum
        self._memory = memory
        places = self._at_places(spectrum.energies)
        if problem.compressor.drop_energy:
            places = _without_least(problem.deal, places, problem.compressor.drop_energy)
        # Sorted by eight bits; what is left unsorted within them is too little to matter.
        self._energy = self._summed(places).cummin(1).values
        self._tempering = self._tempering_of(places)
        self.totals = problem.totals_after(memory)
        alike = memory.alike(problem.compressor.quantizer)
        steps = _steps(problem, alike, self.units.device)
        room = _room(self.totals, len(steps.transfers), self.units.device)
        # Where the last row is empty, its bytes are not for other rows: some tiles lack them.
        rows, last = problem.capacities.rows_and_last
        room = room - torch.where((self._energy > 0).sum(1) < rows, last, 0)[:, None]
        taken = fill(self._weights(memory), room, steps, shared=False)
        self._taken = taken.expand(-1, problem.model.sent, -1)
        # One list of cuts for all tiles, but none has more supergroups than it holds.
        self._held = (places > 0).sum(2)

    def cuts(self, hop: int, chunk: int, tiles: slice) -> Tensor:
        """Return int64[t, widths]: how many supergroups have at least each width."""
        deal = 0 if self.problem.deal.deals == 1 else chunk
        cuts = self._taken[deal, self.problem.model.of_hop[hop]]
        return torch.minimum(cuts, self._held[chunk, tiles][:, None])

    def next_memory(self, memory: Memory) -> Memory:
        """Return a memory with the totals that are best for this spectrum, and its energies."""
        raw = self._summed(self._at_places(self._spectrum.raw))
        totals = self.problem.totals(self._weights(memory), memory)
        return replace(
            memory,
            totals=totals,
            full=self.problem.capacities.full,
            energy=self._by_band(raw),
            noise=self._by_band(self._expected(raw)[0]),
            calls=memory.calls + 1,
        )

    def bands_of_units(self) -> Tensor:
        """Return int64[n * p], the band of each supergroup of the padded bucket."""
        layout = self.problem.deal.layout
        bands = torch.zeros(layout.world_size * layout.positions + 1, dtype=torch.int64)
        bands = bands.to(self.units.device)
        # Places without a supergroup, -1, go to the end.
        bands[self.units] = bands_of(self.problem.deal.size, bands.device).expand_as(self.units)
        return bands[:-1]

    def predicted_vnmse(self) -> float:
        """Return the modelled error of the sum relative to its energy; waits for the device."""
        noise, finished = self._expected(self._summed(self._at_places(self._spectrum.raw)))
        energy = finished.sum().item()
        return noise.sum().item() / energy if energy else 0.0

    def _expected(self, raw: Tensor) -> tuple[Tensor, Tensor]:
        """Return what noise the finished rows should have, and what energy, float64[deals, r]."""
        memory, quantizer = self._memory, self.problem.compressor.quantizer
        device, size = raw.device, self.problem.deal.size
        band = bands_of(size, device)
        none = torch.zeros(BANDS, 1, dtype=torch.float64)
        errors = torch.cat([none, band_errors(quantizer, memory.shapes)], dim=1).to(device)
        width = (torch.arange(size, device=device) < self._taken[..., None]).sum(2)
        pi = noise_peaks(quantizer, memory.shapes).to(device)[band]
        rows = Rows(raw, memory.correlation.to(device)[band], pi)
        return expected_noise(self.problem.model, rows, errors[band, width], self._energy == 0)

    def _by_band(self, rows: Tensor) -> Tensor:
        """Return float64[bands], sums of float64[deals, r], on the CPU."""
        band = bands_of(rows.shape[1], rows.device)
        of_each = torch.where(
            band == torch.arange(BANDS, device=band.device)[:, None, None], rows, 0
        )
        return tree_sum(of_each.view(BANDS, -1)).cpu()

    def _weights(self, memory: Memory) -> Tensor:
        """Return float64[deals, r], what a row's errors count: descending."""
        quantizer, size = self.problem.compressor.quantizer, self.problem.deal.size
        shapes = tuple(memory.shapes.flatten().tolist())
        rough = _roughness(quantizer, shapes, size, self.units.device)
        return self._energy * self._tempering * rough

    def _at_places(self, of_units: Tensor) -> Tensor:
        """Return [n, tiles, size] numbers at their places, 0 where there is no supergroup."""
        return F.pad(of_units, (0, 1))[self.units]  # -1, none, is the last one

    def _summed(self, places: Tensor) -> Tensor:
        """Sum [n, tiles, size] over the tiles of a deal."""
        deals = self.problem.deal.deals
        return tree_sum(places.view(deals, -1, places.shape[2]).transpose(1, 2))

    def _tempering_of(self, places: Tensor) -> Tensor:
        """Return Σ F^p / Σ F of every row; powers by square roots, rounded alike everywhere."""
        eighths = round(8 * self.problem.compressor.energy_power)
        if eighths == 8:
            return torch.ones_like(self._energy)
        root, power = places, torch.ones_like(places)
        for bit in (4, 2, 1):
            root = root.sqrt()
            if eighths & bit:
                power = power * root
        tempered = self._summed(torch.where(places > 0, power, 0.0))
        return torch.where(self._energy > 0, tempered / self._energy, 0.0)


def _without_least(deal: Deal, places: Tensor, share: float) -> Tensor:
    """Return [n, tiles, size] energies without the least that have this share of a deal's sum."""
    n, tiles, size = places.shape
    together = n // deal.deals
    # In the order of the deal: row by row, tile by tile, chunk by chunk.
    ordered = places.view(deal.deals, together, tiles, size).permute(0, 3, 2, 1)
    flat = ordered.reshape(deal.deals, -1)
    total = tree_sum(flat)[:, None]
    parts = (flat / torch.where(total > 0, total, 1.0) * _UNIT).ceil().long()
    from_here = parts.flip(1).cumsum(1).flip(1)
    kept = torch.where(from_here > int(share * _UNIT), flat, 0.0)
    return kept.view(ordered.shape).permute(0, 3, 2, 1).reshape(n, tiles, size)
