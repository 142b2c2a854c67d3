"""How quantisation noise grows along a schedule: what a bit is worth at each hop.

A message of class h carries the sum of k ranks. Quantised, it gains an error of e · (E + π N): e
is the relative error of its width, E the energy of the partial sum, N the noise that the messages
below it have brought. π is 1 for noise that is no more peaked than the entries; that of companded
codes is largest where entries are, which raises the scales of later hops. What a message adds,
later hops quantise again: each amplifies it by 1 + π e.

E = F / n · (k + k (k - 1) ρ), where F is the energy summed over ranks and ρ the mean correlation
between ranks. Classes are the schedule's hops; those of a long ring are taken together in groups
of about the same k, or an allocation for thousands of ranks would take too long.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dynamiq.core.topology import Hop, Schedule

_ALL_APART = 32
"""So many hops are classes of their own."""
_BOUNDLESS = 1e150
"""Noise beyond this is as bad as any: one bit on a ring of a thousand ranks leaves the numbers."""
_ALIKE = 1.25
"""Ratio of ranks summed within which longer chains of hops are taken together."""


@dataclass(frozen=True)
class HopClass:
    """Messages that get the same widths.

    Attributes:
        summed: Ranks k in the partial sum, the mean of the class.
        length: Hops that follow each other in the class, 1 but for parts of a long ring.
        messages: How many messages of the class enter one final entry.
        transfers: How often one chunk crosses a link in the class.
        inputs: Classes that a node of this class receives from, and how many messages of each.
    """

    summed: float
    length: int
    messages: int
    transfers: int
    inputs: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class HopModel:
    """The classes of a schedule, the finished sum's last.

    Attributes:
        world_size: Ranks n.
        classes: In the order of the partial sums.
        of_hop: Class of each hop.
        gather: Whether the finished sum is sent, and so quantised once more.
    """

    world_size: int
    classes: tuple[HopClass, ...]
    of_hop: tuple[int, ...]
    gather: bool

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, schedule: Schedule, gather: bool) -> "HopModel":
        """Read the classes off a schedule.

        All ranks' and chunks' nodes are alike on average; rank 0's, one for each chunk, are read.
        """
        hops = schedule.hops
        inputs = _inputs(schedule)
        groups = _groups(hops, inputs)
        of_hop = [c for c, group in enumerate(groups) for _ in group]
        classes = []
        for group in groups:
            first = inputs[group[0]]
            classes.append(
                HopClass(
                    summed=sum(hops[h].summed for h in group) / len(group),
                    length=len(group),
                    messages=sum(hops[h].transfers if hops[h].reduce else 1 for h in group),
                    transfers=sum(hops[h].transfers for h in group),
                    inputs=tuple((of_hop[h], count) for h, count in sorted(first.items())),
                )
            )
        return cls(schedule.world_size, tuple(classes), tuple(of_hop), gather)

    @property
    def sent(self) -> int:
        """How many classes have messages."""
        return len(self.classes) if self.gather else len(self.classes) - 1

    def energies(self, energy: Tensor, correlation: Tensor) -> Tensor:
        """Return the energies of each class's partial sums, float64[..., classes, r].

        Args:
            energy: float64[..., r], F.
            correlation: float64[..., r], ρ.
        """
        n, k = self.world_size, [c.summed for c in self.classes]
        return torch.stack([energy * (correlation * (x * (x - 1)) + x) / n for x in k], dim=-2)

    def arriving(self, energies: Tensor, errors: Tensor, pi: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noise in each class's partial sums before they are quantised, and its peaks.

        Args:
            energies: float64[..., classes, r], of partial sums.
            errors: float64[..., sent, r], relative errors of the widths.
            pi: float64[..., r], π.

        Returns:
            float64[..., classes, r] each: N, and the energy that N counts as when it is quantised.
        """
        noise: list[Tensor] = []
        peaked: list[Tensor] = []
        sent: list[tuple[Tensor, Tensor]] = []
        for h, c in enumerate(self.classes):
            carried = energies[..., h, :]
            arriving, high = torch.zeros_like(carried), torch.zeros_like(carried)
            for source, count in c.inputs:
                arriving = arriving + sent[source][0] * count
                high = high + sent[source][1] * count
            noise.append(arriving)
            peaked.append(high)
            if h < self.sent:
                growth = power(errors[..., h, :] * pi + 1.0, c.length)
                grown = ((high + carried) * growth).clamp(max=_BOUNDLESS) - carried
                sent.append((arriving + (grown - high) / pi, grown))
        return torch.stack(noise, dim=-2), torch.stack(peaked, dim=-2)

    def visit(self, pi: Tensor, visitor: Callable[[int, Tensor], Tensor]) -> None:
        """Go from the last class to the first, and tell how sensitive the result is to each.

        Args:
            pi: float64[..., r], π.
            visitor: Takes a class that is sent, and float64[..., r]: by how much the error of the
                finished sum grows per energy that the peaks of the class's messages count as.
                Returns the class's relative errors.
        """
        after = [torch.zeros_like(pi) for _ in self.classes]
        for h in reversed(range(len(self.classes))):
            c, onward = self.classes[h], after[h]
            if h < self.sent:
                errors = visitor(h, onward)
                growth = power(errors * pi + 1.0, c.length)
                onward = ((pi * onward + 1.0) * growth).clamp(max=_BOUNDLESS)
                onward = (onward - 1.0) / pi
            nodes = c.messages / c.length
            for source, count in c.inputs:
                below = self.classes[source].messages / self.classes[source].length
                after[source] = after[source] + onward * (nodes * count / below)


def _inputs(schedule: Schedule) -> list[dict[int, float]]:
    """Return, for each hop, the mean number of messages of each hop that its sums receive."""
    reduce = [step for step in schedule.steps(0) if step.reduce]
    received: dict[int, list[int]] = defaultdict(list)
    for step in reduce:
        for m in step.receives:
            received[m.chunk].append(m.hop)
    outgoing = {m.chunk: m.hop for step in reduce for m in step.sends}
    outgoing[0] = len(schedule.hops) - 1
    nodes: dict[int, int] = defaultdict(int)
    totals: list[dict[int, float]] = [defaultdict(float) for _ in schedule.hops]
    for chunk, hop in outgoing.items():
        nodes[hop] += 1
        for source in received[chunk]:
            totals[hop][source] += 1.0
    return [
        {source: count / nodes[hop] for source, count in total.items()}
        for hop, total in enumerate(totals)
    ]


def _groups(hops: Sequence[Hop], inputs: Sequence[dict[int, float]]) -> list[list[int]]:
    """Take hops together that follow each other in a chain and sum about as many ranks."""
    groups: list[list[int]] = []
    for h, hop in enumerate(hops):
        is_chain = h > 0 and inputs[h] == {h - 1: 1.0}
        if (
            len(hops) > _ALL_APART
            and is_chain
            and hop.reduce
            and hop.summed <= _ALIKE * hops[groups[-1][0]].summed
        ):
            groups[-1].append(h)
        else:
            groups.append([h])
    return groups


def power(base: Tensor, exponent: int) -> Tensor:
    """Return base^exponent, bounded, by multiplications only, which all machines round alike."""
    result = None
    while exponent:
        if exponent & 1:
            result = base if result is None else result * base
        base, exponent = (base * base).clamp(max=_BOUNDLESS), exponent >> 1
    assert result is not None
    return result
