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

from dynamiq.compressors.dynamiq.hops import HopModel

_PER_OCTAVE = 8
_LEAST, _GREATEST = -16, 56
"""Octaves of the ratio: below, all codes are the narrowest, and above, the widest."""
_SWEEPS = 8


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
    # From several widths, for where one bit competes with two there is more than one end.
    starts = (0, len(widths.bytes) // 2, len(widths.bytes) - 1)
    ends = torch.stack([row.improved(start) for start in starts])
    best = torch.stack([row.total(end) for end in ends]).argmin(0)
    chosen = ends.gather(0, best.expand(1, model.sent, -1))[0]
    # From the greatest ratio down: a step once taken stays taken at greater ratios.
    lasting = chosen.flip(1).cummin(1).values.flip(1)
    levels = torch.arange(len(widths.bytes))
    taken = lasting[:, None, :] >= levels[:, None]
    never = torch.tensor(torch.inf, dtype=torch.float64)
    first = torch.where(taken, ratios, never).amin(2)
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

    def improved(self, start: int) -> Tensor:
        """Return int64[sent, ratios], indices of widths that no change at one class makes better.

        Args:
            start: Index of the width to begin with.
        """
        model = self.model
        chosen = torch.full((model.sent, self.energies.shape[1]), start)

        def choose(h: int, sensitivity: Tensor) -> Tensor:
            weight = (self.energies[h] + peaked[h]) * model.classes[h].messages
            lasting = (sensitivity * self._pi + 1.0)[:, None] * self._errors
            costs = self._bytes * model.classes[h].transfers
            chosen[h] = (weight[:, None] * lasting + costs).argmin(1)
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
