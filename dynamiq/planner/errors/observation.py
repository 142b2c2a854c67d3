"""Measures spectra: what each rank adds, and what follows from the sum over ranks."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from dynamiq.compressors.dynamiq.memory import bands_of, shapes_of
from dynamiq.core.errors import InputError
from dynamiq.planner.profiles.spectrum import BANDS, PEAKS, POINTS, Band, GradientSpectrum, Shape

SUPERGROUP, BLOCK = 256, 32
_OF_BAND = 128
"""Supergroups of a band whose entries are looked at."""
_SHAPES = BANDS * 2 * 4
_TAIL = _SHAPES + PEAKS + 3
_PARTS = 3
_QUARTERS = 4


def spectrum_of(gradients: Tensor) -> GradientSpectrum:
    """Return the spectrum of float[n, d], row i the entries of rank i.

    Raises:
        InputError: It is no matrix of floating-point numbers, has one rank or no entries, or holds
            NaN or infinities.
    """
    if gradients.dim() != 2 or not gradients.is_floating_point():
        raise InputError(
            f"a spectrum is measured of floating-point gradients [ranks, entries], got "
            f"{gradients.dtype}{list(gradients.shape)}"
        )
    n, d = gradients.shape
    if n < 2 or not d:
        raise InputError(f"a correlation needs two ranks, and entries; got {list(gradients.shape)}")
    if not gradients.isfinite().all():
        raise InputError("the gradients hold NaN or infinities, of which nothing can be learned")
    total = gradients.double().sum(0)
    observed = Observed()
    observed.add("", torch.stack([observe(x, total) for x in gradients]).sum(0), n)
    return observed.spectrum()


def observe(x: Tensor, total: Tensor) -> Tensor:
    """Return what one rank adds: float64[3 u + ...], to be summed over ranks.

    Energies of its u supergroups; their inner products with the sum of all ranks, which tell how
    alike ranks are even where the sum is noisy; squares of the energies; shapes and peaks of a
    sample of its entries.

    Args:
        x: float[d], its entries.
        total: float[d], the sum over ranks.
    """
    x = x.detach()
    own, summed = _supergroups(x).double(), _supergroups(total.detach()).double()
    energy, inner = own.square().sum(1), (own * summed).sum(1)
    order = energy.argsort(descending=True, stable=True)
    band = bands_of(len(energy), energy.device)
    shapes = torch.zeros(BANDS, 2, 4, dtype=torch.float64, device=x.device)
    peaks = torch.zeros(PEAKS, dtype=torch.float64, device=x.device)
    for index in range(BANDS):
        here = order[band == index]
        some = here[:: max(1, -(-len(here) // _OF_BAND))]
        sample = own[some].float()
        if not sample.any():
            continue
        for kind, rotated in enumerate((True, False)):
            found, weights = shapes_of(sample, rotated, None if rotated else "up")
            shapes[index, kind, :3] = (found * weights[:, None]).sum(0)
            shapes[index, kind, 3] = weights.sum()
        peaks += peaks_of(sample) * (energy[here].sum() / energy[some].sum())
    tail = [energy.sum().square().item()]
    tail += [float((x == x.to(dtype)).all()) for dtype in (torch.bfloat16, torch.float16)]
    last = torch.tensor(tail, dtype=torch.float64, device=x.device)
    return torch.cat([energy, inner, energy.square(), shapes.view(-1), peaks, last])


def observed_numel(numel: int) -> int:
    """Return how many numbers :func:`observe` returns for so many entries."""
    return _PARTS * -(-numel // SUPERGROUP) + _TAIL


@dataclass
class Observed:
    """Sums over ranks of several calls, kept as a few hundred numbers for each key."""

    _keys: dict[str, "_Key"] = field(default_factory=dict)
    _tail: Tensor = field(default_factory=lambda: torch.zeros(_TAIL, dtype=torch.float64))
    _ranks: int = 0
    _rank_calls: int = 0
    _energy: float = 0.0
    _concentration: float = 0.0
    _unevenness: float = 0.0

    def add(self, key: str, reduced: Tensor, world_size: int) -> None:
        """Add one call's sum over ranks of what :func:`observe` returned.

        What is not finite, or all zero, is no gradient to learn from and left out.
        """
        reduced = reduced.detach().cpu().double()
        units = (len(reduced) - _TAIL) // _PARTS
        parts, tail = reduced[: _PARTS * units].view(_PARTS, units), reduced[_PARTS * units :]
        energy, inner, squares = parts
        total = energy.sum()
        if not reduced.isfinite().all() or not total:
            return
        order = energy.argsort(descending=True, stable=True)
        points = min(units, POINTS)
        means = [quantiles(part[order], torch.ones(units), points) for part in (energy, inner)]
        known = self._keys.setdefault(key, _Key(units, torch.zeros(2, points, dtype=torch.float64)))
        known.sums += torch.stack(means)
        known.calls += 1
        self._tail += tail
        self._ranks = world_size
        self._rank_calls += world_size
        concentration = torch.where(energy > 0, squares / energy, 0.0).sum()
        self._energy += total.item()
        self._concentration += concentration.item()
        of_ranks = tail[-3].item() * world_size / total.item() ** 2 - 1.0
        self._unevenness += max(0.0, of_ranks) * total.item()

    def spectrum(self) -> GradientSpectrum:
        """Return the spectrum of a mean step.

        Raises:
            InputError: Nothing was observed.
        """
        if not self._keys:
            raise InputError("no gradient was captured yet: no call has ended that had a gradient")
        keys = self._keys.values()
        energy, inner = torch.cat([key.sums / key.calls for key in keys], dim=1)
        weights = torch.cat([torch.full((key.points,), key.units / key.points) for key in keys])
        order = energy.argsort(descending=True, stable=True)
        points = min(round(weights.sum().item()), POINTS)
        energy, inner = (quantiles(x[order], weights[order], points) for x in (energy, inner))
        shapes = self._tail[:_SHAPES].view(BANDS, 2, 4)
        band = bands_of(points, energy.device)
        peaks = self._tail[_SHAPES : _SHAPES + PEAKS]
        exact = self._tail[-2:] == self._rank_calls
        return GradientSpectrum(
            energies=tuple(energy.tolist()),
            world_size=self._ranks,
            correlation=_correlation(energy, inner, self._ranks),
            bands=tuple(
                Band(
                    correlation=_correlation(energy[band == b], inner[band == b], self._ranks),
                    rotated=_mean_shape(shapes[b, 0]),
                    grouped=_mean_shape(shapes[b, 1]),
                )
                for b in range(BANDS)
            ),
            peaks=tuple((peaks / peaks.sum()).tolist()),
            evenness=min(1.0, self._energy / (self._concentration * self._ranks)),
            unevenness=(self._unevenness / self._energy) ** 0.5,
            dtype="bfloat16" if exact[0] else "float16" if exact[1] else "float32",
        )


@dataclass
class _Key:
    """Sums over calls of energies and inner products by quantiles, float64[2, points]."""

    units: int
    sums: Tensor
    calls: int = 0

    @property
    def points(self) -> int:
        return self.sums.shape[1]


def quantiles(values: Tensor, weights: Tensor, points: int) -> Tensor:
    """Return the means of ``points`` equal parts of weighted float64[k], in their order."""
    ends = F.pad(weights.double().cumsum(0), (1, 0))
    sums = F.pad((values.double() * weights).cumsum(0), (1, 0))
    cuts = torch.linspace(0, 1, points + 1, dtype=torch.float64) * ends[-1]
    right = torch.searchsorted(ends, cuts).clamp(1, len(values))
    share = (cuts - ends[right - 1]) / (ends[right] - ends[right - 1])
    at = sums[right - 1] + share.clamp(0, 1) * (sums[right] - sums[right - 1])
    return (at.diff() * (points / ends[-1])).clamp(min=0.0)


def _supergroups(x: Tensor) -> Tensor:
    return F.pad(x.reshape(-1), (0, -x.numel() % SUPERGROUP)).view(-1, SUPERGROUP)


def peaks_of(sample: Tensor) -> Tensor:
    """Return float64[PEAKS], energies of float32[k, 256] by distance from blocks' largest."""
    blocks = sample.abs().double().view(-1, BLOCK)
    largest, where = blocks.max(1, keepdim=True)
    below = (largest / blocks).log2().mul(_QUARTERS).nan_to_num(posinf=PEAKS)
    bins = below.floor().long().add(1).clamp(1, PEAKS - 1).scatter(1, where, 0)
    found = torch.zeros(PEAKS, dtype=torch.float64, device=sample.device)
    return found.index_add(0, bins.view(-1), blocks.square().view(-1))


def _correlation(energy: Tensor, inner: Tensor, ranks: int) -> float:
    total = energy.sum().item()
    ratio = inner.sum().item() / total if total else 1.0
    return min(max((ratio - 1.0) / max(1, ranks - 1), 0.0), 1.0)


def _mean_shape(sums: Tensor) -> Shape:
    first, second, third, weight = sums.tolist()
    return (first / weight, second / weight, third / weight) if weight else (0.0, 0.0, 0.0)
