"""What one call tells the next: bytes per hop, and how ranks and entries are alike.

Sizes of messages must be known before the data, so a hop's share follows from what earlier calls
with the same key have seen. Each rank measures its own slice of a result; the sums over ranks
travel with the next call's statistics, so that all ranks know the same numbers, bit for bit.

The correlation of ranks and the shape of entries differ from large supergroups to small ones;
both are measured by bands of the order of energies.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.errors import noise_peaks, shape_of
from dynamiq.compressors.dynamiq.geometry import Capacities
from dynamiq.core.compressor import State
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.operands import Bucket, entries_of
from dynamiq.kernels.supergroups.rotation import rotate
from dynamiq.kernels.supergroups.wire import SUPERGROUP, GroupScales, Quantizer

BAND_EDGES = (1 / 64, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8, 15 / 16)
"""Where bands end, as shares of the supergroups in the order of their energies."""
BANDS = len(BAND_EDGES) + 1
OBSERVATIONS = 5 * BANDS
"""Numbers that a rank measures: for each band the result's energy, three sums of shapes weighted
by energy, and the sum of weights."""
_CORRELATIONS = tuple(x / 64 for x in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64))
_PEAKS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
_CLEAR = 2.0
"""Noise relative to the energy of entries up to which a band's result says something of ρ."""
_UNKNOWN = 0.5
"""ρ of a band that is mostly noise: too small a value would let noise grow unchecked."""
_FIRST, _EVERY = 4, 8
"""Calls that are learned from."""
LEAST_OBSERVED = 64
"""Supergroups of a bucket from which on ranks tell each other what they have measured."""
_SAMPLE = 64
"""Supergroups whose shape a rank looks at."""
_LARGEST = 2.0**100


@lru_cache(maxsize=64)
def bands_of(size: int, device: torch.device) -> Tensor:
    """Return int64[size], the band of each of so many rows."""
    places = (torch.arange(size, device=device, dtype=torch.float64) + 0.5) / max(1, size)
    edges = torch.tensor(BAND_EDGES, dtype=torch.float64, device=device)
    return torch.searchsorted(edges, places, right=True)


@dataclass(frozen=True)
class Memory:
    """What all ranks know from earlier calls.

    Attributes:
        totals: Bytes of a full tile, by deal and class of hops; () before the first call.
        full: What these were for: supergroups of a full tile, and its mean bytes, by deal.
        correlation: float64[bands], ρ: the mean correlation between ranks.
        shapes: float64[bands, 3], as :class:`dynamiq.compressors.dynamiq.errors.Shape`; zeros
            where nothing is known.
        energy: float64[bands], of the measured call's entries, summed over ranks.
        noise: float64[bands], that the measured call's result should have.
        calls: How many there were.
    """

    totals: tuple[tuple[int, ...], ...] = ()
    full: tuple[tuple[int, int], ...] = ()
    correlation: Tensor = field(default_factory=lambda: _zeros(BANDS))
    shapes: Tensor = field(default_factory=lambda: _zeros(BANDS, 3))
    energy: Tensor = field(default_factory=lambda: _zeros(BANDS))
    noise: Tensor = field(default_factory=lambda: _zeros(BANDS))
    calls: int = 0

    @classmethod
    def of(cls, shared: Mapping[str, Tensor]) -> "Memory":
        """Read what :meth:`shared` wrote."""
        if not shared:
            return cls()
        totals, full = (
            tuple(tuple(row) for row in shared[name].tolist()) for name in ("totals", "full")
        )
        bands = shared["bands"]
        correlation, energy, noise = (bands[:, column] for column in (0, 4, 5))
        calls = int(shared["calls"])
        return cls(totals, full, correlation, bands[:, 1:4], energy, noise, calls)

    def shared(self) -> dict[str, Tensor]:
        """Return it as tensors on the CPU, int64 and float64."""
        ends = torch.stack([self.energy, self.noise], dim=1)
        bands = torch.cat([self.correlation[:, None], self.shapes, ends], dim=1)
        return {
            "totals": torch.tensor(self.totals),
            "full": torch.tensor(self.full),
            "bands": bands,
            "calls": torch.tensor(self.calls),
        }

    @property
    def is_due(self) -> bool:
        """Whether this call's spectrum should be learned: the first few, then one in eight."""
        return self.calls < _FIRST or self.calls % _EVERY == 0

    def alike(self, quantizer: Quantizer) -> tuple[tuple[float, float], ...]:
        """Return ρ and π by band, each the nearest of a few, as what depends on them takes long."""
        correlation, shapes = (tuple(x.flatten().tolist()) for x in (self.correlation, self.shapes))
        return _alike(quantizer, correlation, shapes)

    def totals_for(self, capacities: Capacities, classes: int) -> tuple[tuple[int, ...], ...]:
        """Return the totals if they were decided for such tiles and so many classes, or else ().

        A reduce-scatter has a class less than an all-reduce under the same key.
        """
        alike = self.full == capacities.full and all(len(row) == classes for row in self.totals)
        return self.totals if alike else ()

    def learned(self, observed: Tensor, world_size: int) -> "Memory":
        """Return what is known with the sums over ranks of what they measured.

        Args:
            observed: float32[OBSERVATIONS].
            world_size: Ranks.
        """
        numbers = observed.cpu().double().view(BANDS, 5)
        norm, shapes, weights = numbers[:, 0], numbers[:, 1:4], numbers[:, 4:]
        known = (self.energy > 0) & (norm > 0)
        ratio = (norm - self.noise) / torch.where(known, self.energy, 1.0)
        measured = ((ratio - 1.0) / (world_size - 1)).clamp(0.0, 1.0).tolist()
        correlation = self.correlation.tolist()
        for band, clear in enumerate((known & (self.noise <= _CLEAR * self.energy)).tolist()):
            if clear:
                correlation[band] = measured[band]
            elif band and known[band]:
                correlation[band] = _UNKNOWN
        return replace(
            self,
            correlation=torch.tensor(correlation, dtype=torch.float64),
            shapes=torch.where(
                weights > 0, shapes / torch.where(weights > 0, weights, 1.0), self.shapes
            ),
        )


@lru_cache(maxsize=64)
def _alike(
    quantizer: Quantizer, correlation: tuple[float, ...], shapes: tuple[float, ...]
) -> tuple[tuple[float, float], ...]:
    """Return ρ and π by band; what it says for a call it says for the next seven, too."""
    pi = noise_peaks(quantizer, torch.tensor(shapes, dtype=torch.float64).view(-1, 3))
    return tuple(
        (_nearest(_CORRELATIONS, rho), _nearest(_PEAKS, peak))
        for rho, peak in zip(correlation, pi.tolist(), strict=True)
    )


@dataclass(frozen=True)
class Past:
    """What a call begins with.

    Attributes:
        state: The state before the call.
        observed: float32[OBSERVATIONS], summed over ranks: what they measured of the call before;
            empty if this call's recipe asks for nothing.
        memory: What the shared state says.
    """

    state: State
    observed: Tensor
    memory: Memory


@dataclass(frozen=True)
class Slice:
    """This rank's part of a result: what it measures.

    Attributes:
        entries: The slice, divided by ``divisor``.
        divisor: What the sum over ranks was divided by.
        bands: int64[s], of its supergroups.
        rotated: Whether shapes are those of rotated supergroups.
        group_scales: Of the quantiser.
    """

    entries: Tensor
    divisor: int
    bands: Tensor
    rotated: bool
    group_scales: GroupScales | None

    def observe(self) -> Tensor:
        """Return float32[OBSERVATIONS]; what is not finite is left out."""
        entries = entries_of(self.entries)
        observed = torch.zeros(BANDS, 5, dtype=torch.float64, device=entries.device)
        if entries.numel():
            slices = torch.tensor([0, entries.numel()], device=entries.device)
            bucket = Bucket(entries, slices, -(-entries.numel() // SUPERGROUP))
            energy = ops.statistics(bucket, 1)[0].double()
            energy = torch.where(energy.isfinite(), energy, 0.0) * self.divisor**2
            observed[:, 0].index_add_(0, self.bands[: len(energy)], energy.clamp(max=_LARGEST))
        whole = entries.numel() // SUPERGROUP
        if whole:
            stride = -(-whole // _SAMPLE)
            sample = entries[: whole * SUPERGROUP].view(-1, SUPERGROUP)[::stride]
            shapes, weights = shapes_of(sample.float(), self.rotated, self.group_scales)
            bands = self.bands[:whole:stride]
            observed[:, 1:4].index_add_(0, bands, shapes * weights[:, None])
            observed[:, 4].index_add_(0, bands, weights)
        return observed.view(-1).float()


def shapes_of(
    sample: Tensor, rotated: bool, group_scales: GroupScales | None
) -> tuple[Tensor, Tensor]:
    """Return shapes of supergroups and their weights, energies; 0 for those without a shape.

    Args:
        sample: float32[k, 256].
        rotated: Whether shapes are those of rotated supergroups.
        group_scales: Of the quantiser.

    Returns:
        float64[k, 3] and float64[k].
    """
    largest = sample.abs().amax(1, keepdim=True)
    scaled = sample / torch.where(largest > 0, largest, 1.0)
    if rotated:
        scaled = rotate(scaled, torch.arange(len(scaled), device=scaled.device), 0)
    shapes = shape_of(scaled, group_scales)
    weights = sample.double().square().sum(1).clamp(2.0**-100, _LARGEST)
    known = shapes.isfinite().all(1)
    return torch.where(known[:, None], shapes, 0.0), torch.where(known, weights, 0.0)


def _nearest(ascending: Sequence[float], x: float) -> float:
    """Return the nearest of some numbers; of two as near, the lower one."""
    i = bisect_left(ascending, x, hi=len(ascending) - 1)
    return ascending[i - 1] if i and x - ascending[i - 1] <= ascending[i] - x else ascending[i]


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.float64)
