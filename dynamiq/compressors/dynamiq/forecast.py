"""The error that calls will have once they have learned: from a spectrum, for any budget.

An allocation follows from a price: every row has the widths that are best for the ratio of its
weight to the price. So errors and bytes of a row are functions of that ratio, found once for a
schedule, and a recipe's error is known for all budgets after one walk through the prices.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.compressor import DynamiQCompressor
from dynamiq.compressors.dynamiq.errors import band_errors, noise_peaks, roughness, shipped_errors
from dynamiq.compressors.dynamiq.hops import HopModel
from dynamiq.compressors.dynamiq.memory import Memory, bands_of
from dynamiq.compressors.dynamiq.prediction import Rows, expected_noise
from dynamiq.compressors.dynamiq.worth import Choices, Widths, joint_choices, separable_worth
from dynamiq.core.topology import Schedule
from dynamiq.kernels.supergroups.wire import SUPERGROUP, supergroup_bytes

_EVERY = 4
"""One in so many of the ratios that allocations go by: two for an octave."""
_ALL_BANDS = 64
"""Ranks up to which widths are chosen for each band; beyond, that takes too long."""
_FINE = 4
"""Prices for each of these."""


@dataclass(frozen=True)
class Supply:
    """A spectrum, as far as DynamiQ's errors depend on it.

    Attributes:
        energies: Of supergroups, in descending order, summed over ranks.
        correlation: ρ by band.
        shapes: By band, zeros where nothing is known.
    """

    energies: tuple[float, ...]
    correlation: tuple[float, ...]
    shapes: tuple[tuple[float, float, float], ...]


def forecast_vnmse(compressor: DynamiQCompressor, schedule: Schedule, supply: Supply) -> float:
    """Return the modelled vNMSE of an all-reduce, the hops' shares being those of the spectrum.

    Errors of dithered codes follow from the shapes; those of others are of Gaussian entries, and
    those of correlated rounding are taken as independent.

    Args:
        compressor: The recipe.
        schedule: Of one level.
        supply: Of one bucket's supergroups, or a sample.
    """
    curve = _curve(compressor.model_copy(update={"bit_budget": 17.0}), schedule, supply)
    budget = compressor.bit_budget * SUPERGROUP / 8 - compressor.statistics_bytes
    return curve.vnmse(budget)


@dataclass(frozen=True)
class _Curve:
    """Bytes of a mean supergroup, ascending, and the logarithm of the error, float64[k] each."""

    nbytes: Tensor
    logarithm: Tensor

    def vnmse(self, budget: float) -> float:
        """Return the error of a budget; the ends' beyond the ends."""
        at = torch.tensor([budget], dtype=torch.float64)
        right = int(torch.searchsorted(self.nbytes, at).clamp(1, len(self.nbytes) - 1))
        low, high = self.nbytes[right - 1].item(), self.nbytes[right].item()
        share = min(max((budget - low) / (high - low), 0.0), 1.0) if high > low else 1.0
        low, high = self.logarithm[right - 1].item(), self.logarithm[right].item()
        return math.exp(low + share * (high - low))


@lru_cache(maxsize=256)
def _curve(compressor: DynamiQCompressor, schedule: Schedule, supply: Supply) -> _Curve:
    """Return the errors of all budgets."""
    model, quantizer = HopModel.of(schedule, True), compressor.quantizer
    energies = torch.tensor(supply.energies, dtype=torch.float64)
    shapes = torch.tensor(supply.shapes, dtype=torch.float64)
    rho = torch.tensor(supply.correlation, dtype=torch.float64)
    band = bands_of(len(energies), energies.device)
    nbytes = tuple(supergroup_bytes(w, quantizer.group_scales) for w in quantizer.widths)
    alike = Memory(correlation=rho, shapes=shapes).alike(quantizer)
    if schedule.world_size > _ALL_BANDS:
        # As if all rows were like those that most of the error counts for.
        counted = torch.zeros_like(rho).index_add(0, band, energies.pow(compressor.energy_power))
        alike = (alike[int(counted.argmax())],) * len(rho)
    every = [_choices(compressor, model, nbytes, of_band) for of_band in alike]
    ratios, chosen = every[0].ratios, torch.stack([choices.chosen for choices in every])
    sizes = torch.tensor(nbytes, dtype=torch.float64)[chosen]
    transfers = torch.tensor([float(c.transfers) for c in model.classes[: model.sent]]).double()
    size = (sizes * transfers[:, None]).sum(1) / transfers.sum()
    ones = torch.ones(len(rho), len(ratios), dtype=torch.float64)
    pi = noise_peaks(quantizer, shapes)[:, None] * ones
    of_widths = band_errors(quantizer, shapes)
    errors = torch.stack([of_widths[b][chosen[b]] for b in range(len(rho))])
    lost = torch.zeros_like(ones, dtype=torch.bool)
    noise, finished = expected_noise(model, Rows(ones, rho[:, None] * ones, pi), errors, lost)
    weights = energies.pow(compressor.energy_power) * roughness(quantizer, shapes)[band]
    return _walk(ratios.log2(), size, noise.log(), weights, energies, finished[:, 0], band)


def _choices(
    compressor: DynamiQCompressor,
    model: HopModel,
    nbytes: tuple[int, ...],
    alike: tuple[float, float],
) -> Choices:
    """Return widths by the ratio of weight to price, as the recipe chooses them."""
    if compressor.allocation == "exact":
        widths = Widths(nbytes, shipped_errors(compressor.quantizer))
        return joint_choices(model, widths, alike, compressor.hop_aware, _EVERY)
    widths = Widths(nbytes, tuple(4.0**-w for w in compressor.widths))
    ratios = joint_choices(model, widths, alike, False, _EVERY).ratios
    worth = torch.tensor(separable_worth(widths), dtype=torch.float64)
    chosen = (ratios >= worth[:, None]).sum(0) - 1
    return Choices(ratios, chosen.expand(model.sent, -1))


def _walk(  # noqa: PLR0913 - one step of the curve
    ratios: Tensor,
    size: Tensor,
    noise: Tensor,
    weights: Tensor,
    energies: Tensor,
    growth: Tensor,
    band: Tensor,
) -> _Curve:
    """Return the curve.

    Args:
        ratios: float64[k], logarithms to base 2, evenly spaced.
        size: float64[bands, k], bytes of a supergroup.
        noise: float64[bands, k], logarithm of the error of an energy of 1.
        weights: float64[u], of the rows.
        energies: float64[u], summed over ranks.
        growth: float64[bands], energy of the finished sum of an energy of 1.
        band: int64[u].
    """
    total = (energies * growth[band]).sum()
    if not total:
        return _Curve(torch.tensor([0.0, 1.0]).double(), torch.tensor([-torch.inf] * 2).double())
    step = (ratios[1] - ratios[0]).item()
    known = weights > 0
    place = torch.where(known, weights, 1.0).log2() / step
    low = place[known].min().item() - len(ratios)
    count = int((place[known].max().item() - low) * _FINE) + _FINE
    prices = low + torch.arange(count, dtype=torch.float64) / _FINE
    at = (place - prices[:, None] - ratios[0].item() / step).clamp(0, len(ratios) - 1.000001)
    left = at.long()
    share = at - left
    spent = size[band[None], left]
    spent = spent + share * (size[band[None], left + 1] - spent)
    spent = torch.where(known, spent, size[0, 0]).mean(1)
    of_row = noise[band[None], left]
    of_row = of_row + share * (noise[band[None], left + 1] - of_row)
    error = (of_row.exp() * energies).sum(1) / total
    spent, error = spent.flip(0), error.flip(0)
    # Ascending bytes; an error never grows with them.
    return _Curve(spent.cummax(0).values, error.cummin(0).values.clamp(min=1e-300).log())
