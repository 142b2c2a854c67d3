"""The error of THC: integers are summed exactly, so that only a rank's own rounding counts."""

import math
from functools import lru_cache
from statistics import NormalDist

import torch

from dynamiq.compressors.thc.compressor import THCCompressor
from dynamiq.planner.profiles.spectrum import GradientSpectrum

_ORDERS = 15
_POINTS = 1 << 14


def summed_integers_vnmse(
    compressor: THCCompressor, world_size: int, spectrum: GradientSpectrum
) -> float:
    """Return the vNMSE of a sum, which is the same on every topology.

    Rotated entries are Gaussian. What they lose by rounding is independent, so that it is Q / (1 +
    (n - 1) ρ). What they lose by clamping is a function of them: its part of Hermite order j has
    the correlation ρ^j.
    """
    n, rho = world_size, spectrum.correlation
    # The largest of n energies, were they Gaussian: the range is that of its rank.
    largest = 1.0 + spectrum.unevenness * max(0.0, NormalDist().inv_cdf(1.0 - 0.56 / (n + 0.12)))
    clamped, rounded = _losses(compressor, compressor.clamp * math.sqrt(largest))
    alike = sum(c * (1 + (n - 1) * rho**j) for j, c in enumerate(clamped, start=1))
    return (alike + rounded) / (1 + (n - 1) * rho)


@lru_cache(maxsize=64)
def _losses(compressor: THCCompressor, t: float) -> tuple[tuple[float, ...], float]:
    """Return what a standard Gaussian entry loses: clamped, by Hermite order; rounded."""
    g = compressor.granularity
    # Midpoints of equally likely parts would miss the tails: a grid of values with densities.
    x = (torch.arange(_POINTS, dtype=torch.float64) + 0.5) / _POINTS * 20.0 - 10.0
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi) * (20.0 / _POINTS)
    lost = x.clamp(-t, t) - x
    total = (lost.square() * density).sum().item()
    by_order, before, current = [], torch.ones_like(x), x
    for order in range(1, _ORDERS + 1):
        by_order.append((lost * current * density).sum().item() ** 2 / math.factorial(order))
        before, current = current, x * current - order * before
    # Higher orders have correlations near zero.
    by_order[-1] += total - sum(by_order)
    table = torch.tensor(compressor.receiver_table or range(g + 1), dtype=torch.float64)
    levels = (table / g * 2 - 1) * t
    v = x.clamp(-t, t)
    above = torch.searchsorted(levels, v).clamp(1, len(levels) - 1)
    rounded = ((v - levels[above - 1]) * (levels[above] - v) * density).sum().item()
    return tuple(by_order), rounded
