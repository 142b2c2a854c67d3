"""Errors of formats that round a partial sum anew at every hop: floats and MX elements."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.hops import HopClass, HopModel
from dynamiq.compressors.dynamiq.prediction import Rows, expected_noise
from dynamiq.compressors.mx import MXCompressor
from dynamiq.core.compressor import State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.topology import Schedule
from dynamiq.planner.errors.observation import peaks_of
from dynamiq.planner.profiles.spectrum import PEAKS
from dynamiq.topologies import Ring

_BLOCK, _SUPERGROUP = 32, 256
_WITHIN, _PHASES, _TIMES = 8, 32, 4
"""Entries tried in a quarter of an octave, positions of the scale, and how often."""
_GAUSSIAN = 2048
"""Supergroups of Gaussian entries that are looked at."""


@dataclass(frozen=True)
class Loss:
    """What one rounding does to a sum.

    Attributes:
        squared: Mean squared error relative to the energy.
        shift: Of that, what is the same at every rounding of the same entries: their mean errors
            squared. Saturated entries have it; it adds up along a schedule.
        drift: The square of the mean error of all entries: what is left of the shift where sums
            change so much from hop to hop that other entries are the largest.
        nearest: Bits of the mantissa if rounding is to nearest, so that what is less than half a
            step is lost whenever it is added to a sum that was rounded; None for others.
    """

    squared: float
    shift: float = 0.0
    drift: float = 0.0
    nearest: int | None = None


@dataclass(frozen=True)
class Ranks:
    """Whose sum is rounded.

    Attributes:
        schedule: Of one level.
        correlation: ρ.
        evenness: As in :class:`dynamiq.planner.profiles.spectrum.GradientSpectrum`.
        exact: Whether a rank's own entries are sent as they are.
        gather: Whether the finished sum is rounded, too.
    """

    schedule: Schedule
    correlation: float
    evenness: float = 1.0
    exact: bool = False
    gather: bool = True


def rounded_vnmse(loss: Loss, ranks: Ranks) -> float:
    """Return the vNMSE of a sum whose partial sums are rounded at every hop.

    What is lost alike at every hop takes entries that all ranks share: where a few ranks hold most
    of a supergroup, a sum that was rounded once is not moved again. So it counts by the evenness.
    """
    model = HopModel.of(ranks.schedule, ranks.gather)
    rho = torch.tensor([ranks.correlation], dtype=torch.float64)
    rows = Rows(torch.ones(1, 1, dtype=torch.float64), rho, torch.ones(1, dtype=torch.float64))
    alike = loss.drift + (loss.shift - loss.drift) * _chained(model)
    apart = loss.squared - alike * ranks.evenness**2
    of_hops = [0.0 if ranks.exact and c.summed == 1 else apart for c in model.classes[: model.sent]]
    errors = torch.tensor(of_hops, dtype=torch.float64).view(1, -1, 1)
    noise, finished = expected_noise(model, rows, errors, torch.zeros(1, 1, dtype=torch.bool))
    shrunk = math.sqrt(alike * _alike(model, ranks.correlation))
    if loss.nearest is not None:
        shrunk += _swamped(model, ranks.correlation, loss.nearest)
    total = noise.item() / finished.item() + math.expm1(-shrunk * ranks.evenness) ** 2
    return total if loss.nearest is None else min(1.0, total)


def _chain(model: HopModel) -> list[HopClass]:
    """Return the classes in which one message is added to a rank's own entries."""
    return [c for c in model.classes if len(c.inputs) == 1 and c.inputs[0][1] == 1.0]


@lru_cache(maxsize=64)
def _chained(model: HopModel) -> float:
    """Return which share of what is rounded is rounded along chains of sums that differ little."""
    sent = [c.summed * c.messages for c in model.classes[: model.sent]]
    chain = [c.summed * c.messages for c in _chain(model)]
    return min(1.0, sum(chain) / sum(sent))


@lru_cache(maxsize=64)
def _swamped(model: HopModel, correlation: float, bits: int) -> float:
    """Return which share of what ranks have in common is lost because it is added in small parts.

    An increment with the standard deviation z steps keeps the share (1/z) Σ φ((j + 1/2) / z) of its
    mean when it is added to a multiple of the step and the sum is rounded to nearest. That is so
    where one message is added to a rank's own entries. Entries of the sum are Gaussian and count
    by their energies; where they are between two powers of two is random.
    """
    chain = _chain(model)
    if not chain:
        return 0.0
    k = torch.tensor([c.summed for c in chain], dtype=torch.float64).clamp(min=1.0)
    sums = (k + k * (k - 1) * correlation).sqrt()[:, None, None]
    mantissas = 2.0 ** ((torch.arange(8, dtype=torch.float64) + 0.5) / 8)
    sizes = (torch.arange(20, dtype=torch.float64) + 0.5) / 5
    weights = sizes.square() * torch.exp(-sizes.square() / 2)
    steps = sums * sizes[:, None] / mantissas * 2.0**-bits
    z = max(1.0 - correlation, 1e-6) ** 0.5 / steps
    offsets = torch.arange(-4, 4, dtype=torch.float64) + 0.5
    density = torch.exp(-(offsets / z[..., None]).square() / 2).sum(-1) / math.sqrt(2 * math.pi)
    lost = torch.where(z < 1.0, 1.0 - density / z, 0.0).clamp(0.0, 1.0).mean(2)
    of_hops = (lost * weights).sum(1) / weights.sum()
    lengths = torch.tensor([float(c.length) for c in chain], dtype=torch.float64)
    return (of_hops * lengths).sum().item() / model.world_size


@lru_cache(maxsize=64)
def _alike(model: HopModel, correlation: float) -> float:
    """Return the energy of Σ S_m over all messages m, relative to that of the finished sum.

    S_m is what message m sums. If the entries of rank i go through d_i messages, that energy is
    ρ (Σ d_i)² + (1 - ρ) Σ d_i², in units of one rank's.
    """
    sums: list[tuple[float, float, float]] = []
    for index, c in enumerate(model.classes):
        ranks, once, twice = 1.0, 0.0, 0.0
        for source, count in c.inputs:
            ranks, once, twice = (
                have + count * more
                for have, more in zip((ranks, once, twice), sums[source], strict=True)
            )
        for step in range(c.length if index < model.sent else 0):
            ranks += 1.0 if step else 0.0
            once, twice = once + ranks, twice + 2.0 * once + ranks
        sums.append((ranks, once, twice))
    n = model.world_size
    _, once, twice = sums[-1]
    return (correlation * once**2 + (1 - correlation) * twice) / (n + n * (n - 1) * correlation)


@lru_cache(maxsize=64)
def mx_loss(compressor: MXCompressor, peaks: tuple[float, ...]) -> Loss:
    """Return what one rounding does to blocks with given peaks (``GradientSpectrum.peaks``).

    Where a block's largest entry lies between two powers of two is taken as random.
    """
    squared, mean = _mx_losses(compressor)
    shares = torch.tensor(peaks or _gaussian_peaks(), dtype=torch.float64)
    whole = (shares * squared).sum().item()
    if compressor.rounding != "nearest":
        return Loss(whole)
    return Loss(
        whole,
        (shares * mean.square()).sum().item(),
        (shares * mean).sum().item() ** 2,
        nearest=int(compressor.format[-1]),  # bits of the element's mantissa
    )


@lru_cache(maxsize=64)
def _mx_losses(compressor: MXCompressor) -> tuple[Tensor, Tensor]:
    """Return mean squared and mean relative errors by distance from the largest, float64[PEAKS].

    The format itself rounds blocks of one entry that is the largest and others that are lower.
    """
    lower = (PEAKS - 1) * _WITHIN
    below = (torch.arange(lower, dtype=torch.float64) + 0.5) / (4 * _WITHIN)
    blocks = -(-lower // (_BLOCK - 1))
    grid = torch.zeros(blocks, _BLOCK, dtype=torch.float64)
    grid[:, 0] = 1.0
    entries = torch.zeros(blocks * (_BLOCK - 1), dtype=torch.float64)
    entries[:lower] = 2.0**-below
    grid[:, 1:] = entries.view(blocks, -1)
    phases = 2.0 ** ((torch.arange(_PHASES * _TIMES, dtype=torch.float64) + 0.5) / _PHASES)
    x = (grid[None] * phases[:, None, None]).float()
    arrived = _arrived(compressor, x.view(-1)).view(x.shape)
    error = ((arrived - x).double() / torch.where(x > 0, x, 1.0)).view(len(phases), blocks, _BLOCK)
    squared, mean = error.square().mean(0), error.mean(0)

    def by_distance(values: Tensor) -> Tensor:
        rest = values[:, 1:].reshape(-1)[:lower].view(-1, _WITHIN).mean(1)
        return torch.cat([values[:, 0].mean().view(1), rest])

    return by_distance(squared), by_distance(mean)


def _arrived(compressor: MXCompressor, x: Tensor) -> Tensor:
    """Return float32[d] as it is after one message."""
    layout = Layout(x.numel(), 1, compressor.unit(x.numel(), 1))
    encoding = compressor.encode(None, layout, Ring().schedule(2), Call(0, 0), State())
    message = Message(0, 0, 1, 0)
    positions = range(encoding.positions)
    out = torch.empty_like(x)
    work = encoding.load(x, 0, out)
    payload = torch.empty(encoding.payload_bytes(message, positions), dtype=torch.uint8)
    encoding.compress(work, message, positions, payload)
    encoding.decompress(payload, work, message, positions)
    encoding.store(work, out)
    return out


@lru_cache(maxsize=1)
def _gaussian_peaks() -> tuple[float, ...]:
    """Return the peaks of blocks of independent Gaussian entries."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.empty(_GAUSSIAN, _SUPERGROUP).normal_(generator=generator)
    peaks = peaks_of(blocks)
    return tuple((peaks / peaks.sum()).tolist())
