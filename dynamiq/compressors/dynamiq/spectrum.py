"""The supergroups of a bucket as their reduced statistics describe them: energy, range, mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.compressors.supergroups import Supergroups
from dynamiq.core.arithmetic import divide
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call

_HUGE_ENERGY = 2.0**100
_TINY_ENERGY = 2.0**-100
_LEAST_CENTRED_SHARE = 2.0**-7


@dataclass(frozen=True)
class Spectrum:
    """The supergroups of a bucket, as the reduced statistics describe them.

    Attributes:
        energies: float64[n * p], what the allocation sees; 0 for supergroups that are zero or
            non-finite on any rank, -1 for padding.
        factor: float32[n * p], a power of two that brings entries into range.
        shift: float32[n * p], what is subtracted after that.
        offset: float32[n * p], what is added to the result; NaN for contaminated supergroups.
        raw: float64[n * p], energies before centring.
    """

    energies: Tensor
    factor: Tensor
    shift: Tensor
    offset: Tensor
    raw: Tensor

    @classmethod
    def of(cls, statistics: Tensor, layout: Layout, call: Call, centred: bool) -> "Spectrum":
        """Read statistics float32[u] energies, or float32[2 u] energies and means.

        Args:
            statistics: Sums over ranks.
            layout: In units of 256.
            call: Its divisor.
            centred: Whether the allocation sees the energy that centring leaves.
        """
        n = layout.world_size
        supergroups = Supergroups.of(layout, statistics.device)
        counts, real = supergroups.counts, supergroups.real
        parts = statistics.view(-1, supergroups.units)
        energy = statistics.new_full(counts.shape, -1.0)
        energy[real] = parts[0]
        finite = energy < torch.inf  # not NaN either
        energy = torch.where(finite, energy, 0.0)
        # Range: F alone decides, so that all ranks agree (a power of two is exact).
        factor = torch.where(energy >= _HUGE_ENERGY, 2.0**-80, 1.0)
        factor.masked_fill_(energy < _TINY_ENERGY, 2.0**80)
        mean = shift = torch.zeros_like(energy)
        if len(parts) > 1:
            mean[real] = divide(parts[1], n)
            shift = torch.where(energy > 0, mean * factor, 0.0)
        offset = (shift * (n / call.divisor)).masked_fill_(~finite, torch.nan)
        energies = raw = energy.double()
        if centred:
            left = raw - n * counts * mean.double().square()
            left = torch.maximum(left, raw * _LEAST_CENTRED_SHARE)
            energies = torch.where(raw > 0, left, raw)
        return cls(energies, factor, shift, offset, raw)

    @property
    def is_finite(self) -> bool:
        """Whether no supergroup is contaminated; waits for the device."""
        return not self.offset.isnan().any().item()
