"""The rate-distortion limit of a spectrum: no code can do better, whatever it costs to compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamiq.simulation.sources import supergroup_sums


def rate_distortion_limit(total: Tensor, bits: Sequence[float]) -> list[float]:
    """Return the least vNMSE with which float[d] can be described, at each number of bits.

    The entries of supergroup j count as independent Gaussians of variance σ_j², the mean square of
    the summed gradient in that supergroup. Reverse water-filling: at the level θ a component of
    variance σ² gets ½ log₂(σ²/θ) bits and has the error θ if σ² > θ, and else gets none and is lost
    with the error σ². The level is the one at which the mean over all entries is the given number
    of bits; the errors' sum is divided by the energy ‖total‖².

    So it is the limit for describing the finished sum once, on one link: hops, statistics, scales
    and which supergroup has which variance cost nothing. Real entries that are not Gaussian given
    their supergroup's energy can go below it; none of the formats knows more of them.

    Args:
        total: The sum over ranks.
        bits: Per entry, each ≥ 0.
    """
    d = total.numel()
    counts = supergroup_sums(torch.ones(d, dtype=torch.float64))
    energies = supergroup_sums(total.double().square())
    variances, order = (energies / counts).sort(descending=True)
    counts = counts[order]
    positive = variances > 0
    variances, counts = variances[positive], counts[positive]
    energy = energies.sum().item()
    if not energy:
        return [0.0 for _ in bits]
    # With the first k supergroups above the level: Σ c log₂ σ² - 2 d bits = log₂ θ Σ c.
    filled = counts.cumsum(0)
    logarithms = (counts * variances.log2()).cumsum(0)
    left = energy - (counts * variances).cumsum(0)
    limits = []
    for rate in bits:
        levels = (logarithms - 2.0 * rate * d) / filled
        # The level falls below the next variance until everything above it is filled.
        last = int((variances.log2() >= levels).sum()) - 1
        distortion = filled[last] * levels[last].exp2() + left[last].clamp(min=0.0)
        limits.append(min(1.0, distortion.item() / energy))
    return limits
