"""How much weight each step to a wider code needs, at each hop.

Alone, a step pays if the error that it saves, W · (e_a - e_c), exceeds the price of its bytes. On
a schedule, a hop's error grows with the noise that has arrived, and later hops amplify it, so the
widths of one row at all hops depend on each other. But they depend on nothing else than the ratio
of the row's weight to the price: so they are found once for each ratio, hop after hop until
nothing changes (Gauss and Seidel's iteration), and kept as the least ratios that take each step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.hops import HopModel, power

_PER_OCTAVE = 8
_LEAST, _GREATEST = -64, 56
"""Octaves of the ratio; above, all codes are the widest."""
_ALWAYS = 2.0**-90
"""Worth of a step that is taken at the least ratio, and so at all of them."""
_SWEEPS = 24


@dataclass(frozen=True)
class Widths:
    """What widths cost and what they leave.

    Attributes:
        bytes: Of a supergroup at each width, ascending.
        errors: e of each width.
    """

    bytes: tuple[int, ...]
    errors: tuple[float, ...]


def separable_worth(widths: Widths) -> list[float]:
    """Return the worth of each step if nothing but its own error counts.

    Widths above the lower convex hull of the error get the worth of the step past them.
    """
    hull = _hull(widths)
    worth = [0.0]
    for a, c in pairwise(hull):
        gain = (widths.errors[a] - widths.errors[c]) / (widths.bytes[c] - widths.bytes[a])
        worth += [1.0 / gain] * (c - a)
    return worth + [math.inf] * (len(widths.bytes) - len(worth))


@lru_cache(maxsize=256)
def joint_worth(model: HopModel, widths: Widths, correlation: float, pi: float) -> Tensor:
    """Return the worth of each step at each class of hops, float64[sent, widths].

    Args:
        model: The classes.
        widths: Costs and errors.
        correlation: ρ.
        pi: π, how peaked noise is.
    """
    ratios = _ratios()
    row = _Row(model, widths, model.energies(ratios, torch.full_like(ratios, correlation)), pi)
    chosen = row.improved(row.best_uniform().expand(model.sent, -1))
    return _worth(chosen, ratios, len(widths.bytes))


@lru_cache(maxsize=256)
def uniform_worth(model: HopModel, widths: Widths, correlation: float, pi: float) -> Tensor:
    """Return the worth of each step if all hops have the same widths, float64[1, widths]."""
    ratios = _ratios()
    row = _Row(model, widths, model.energies(ratios, torch.full_like(ratios, correlation)), pi)
    return _worth(row.best_uniform()[None], ratios, len(widths.bytes))


@dataclass(frozen=True)
class Choices:
    """The best widths at every ratio of a row's weight to the price.

    Attributes:
        ratios: float64[k], ascending by a factor.
        chosen: int64[sent, k], indices of widths.
    """

    ratios: Tensor
    chosen: Tensor


@lru_cache(maxsize=256)
def joint_choices(
    model: HopModel, widths: Widths, alike: tuple[float, float], hop_aware: bool, every: int
) -> Choices:
    """Return the best widths for one in ``every`` of the ratios that :func:`joint_worth` tries.

    Args:
        model: The classes.
        widths: Costs and errors.
        alike: ρ and π.
        hop_aware: Whether hops have widths of their own.
        every: The more, the coarser and the faster.
    """
    ratios = _ratios()[::every]
    correlation, pi = alike
    row = _Row(model, widths, model.energies(ratios, torch.full_like(ratios, correlation)), pi)
    uniform = row.best_uniform().expand(model.sent, -1)
    return Choices(ratios, row.improved(uniform) if hop_aware else uniform)


def _worth(chosen: Tensor, ratios: Tensor, count: int) -> Tensor:
    """Return the least ratio from which each of ``count`` widths is reached, float64[k, count].

    Args:
        chosen: int64[k, ratios], indices of widths.
        ratios: float64[ratios], ascending.
        count: Of widths.
    """
    # A width once reached is not given up at a greater ratio, whatever the others are there.
    taken = chosen[:, None, :] >= torch.arange(count)[:, None]
    never = torch.tensor(torch.inf, dtype=torch.float64)
    first = torch.where(taken, ratios, never).amin(2)
    first[first == ratios[0]] = _ALWAYS
    first[:, 0] = 0.0
    return first


@dataclass
class _Row:
    """One row at many ratios of its weight to the price: float64[classes, ratios] energies."""

    model: HopModel
    widths: Widths
    energies: Tensor
    pi: float

    def __post_init__(self) -> None:
        self._errors = torch.tensor(self.widths.errors, dtype=torch.float64)
        self._bytes = torch.tensor(self.widths.bytes, dtype=torch.float64)
        self._pi = torch.full_like(self.energies[0], self.pi)

    def best_uniform(self) -> Tensor:
        """Return int64[ratios], indices of the widths that are best for all classes together."""
        shape = (self.model.sent, self.energies.shape[1])
        choices = [torch.full(shape, index) for index in range(len(self.widths.bytes))]
        return torch.stack([self.total(choice) for choice in choices]).argmin(0)

    def improved(self, start: Tensor) -> Tensor:
        """Return int64[sent, ratios], indices of widths that no change at one class makes better.

        Args:
            start: int64[sent, ratios], where to begin.
        """
        model = self.model
        chosen = start.clone()

        def choose(h: int, sensitivity: Tensor) -> Tensor:
            c = model.classes[h]
            # What a chain of hops adds, and what later ones make of it.
            added = (power(self._errors * self.pi + 1.0, c.length) - 1.0) / self.pi
            weight = (self.energies[h] + peaked[h]) * (sensitivity * self._pi + 1.0)
            total = weight[:, None] * (added * (c.messages / c.length))
            best = (total + self._bytes * c.transfers).argmin(1)
            # By one width at a time: hops that all give way at once would drown each other.
            chosen[h] += (best - chosen[h]).clamp(-1, 1)
            return self._errors[chosen[h]]

        for _ in range(_SWEEPS):
            before = chosen.clone()
            _, peaked = model.arriving(self.energies, self._errors[chosen], self._pi)
            model.visit(self._pi, choose)
            if torch.equal(before, chosen):
                break
        return chosen

    def total(self, chosen: Tensor) -> Tensor:
        """Return float64[ratios]: noise of the finished sum, and bytes."""
        errors = self._errors[chosen]
        noise, peaked = self.model.arriving(self.energies, errors, self._pi)
        finished = noise[-1]
        if self.model.gather:
            finished = finished + errors[-1] * (self.energies[-1] + peaked[-1])
        transfers = torch.tensor([c.transfers for c in self.model.classes[: self.model.sent]])
        return finished + (self._bytes[chosen] * transfers[:, None]).sum(0)


def _hull(widths: Widths) -> list[int]:
    """Return the indices on the lower convex hull of errors over bytes."""

    def gain(a: int, b: int) -> float:
        return (widths.errors[a] - widths.errors[b]) / (widths.bytes[b] - widths.bytes[a])

    hull: list[int] = []
    for i in range(len(widths.bytes)):
        while len(hull) > 1 and gain(hull[-2], hull[-1]) <= gain(hull[-1], i):
            hull.pop()
        hull.append(i)
    while len(hull) > 1 and gain(hull[-2], hull[-1]) <= 0.0:
        hull.pop()
    return hull


def _ratios() -> Tensor:
    """Return 2^(i / 8), by roots and products that all machines round alike."""
    root = math.sqrt(math.sqrt(math.sqrt(2.0)))
    within: Sequence[float] = [1.0]
    for _ in range(_PER_OCTAVE - 1):
        within = [*within, within[-1] * root]
    octaves = range(_LEAST, _GREATEST)
    return torch.tensor([2.0**o * x for o in octaves for x in within], dtype=torch.float64)
