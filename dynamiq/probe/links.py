"""How long messages take between ranks that all send at once."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from dynamiq.planner.profiles.hardware import Link, MessageTime
from dynamiq.probe.together import Together

SIZES = tuple(1 << k for k in range(10, 27, 2))
"""1 KiB to 64 MiB."""
_FEWEST, _MOST = 3, 15
_ALWAYS = 2
"""Sizes that are measured however slow the link is: a latency and a bandwidth need as many."""


@dataclass(frozen=True)
class LinkTimes:
    """What exchanges took.

    Attributes:
        times: By size, ascending.
        cpu_byte_s: Processor time of the process per byte of the largest, sent and received at
            once.
    """

    times: tuple[MessageTime, ...]
    cpu_byte_s: float


@dataclass(frozen=True)
class LinkProbe:
    """Exchanges over one kind of link.

    Attributes:
        together: The ranks.
        distances: How far from this rank those are to which it sends, one after the other in every
            round.
        within: Consecutive ranks in whose circle distances are counted.
        budget_s: Time after which no larger size is begun.
        advance: Called after each size, measured or not.
    """

    together: Together
    distances: Sequence[int]
    within: int
    budget_s: float
    advance: Callable[[], None]

    def measure(self) -> "LinkTimes":
        """Return the times by size; collective, and the same on all ranks.

        An exchange takes what a round took, on the rank where it took longest, over its exchanges;
        the median over rounds.
        """
        self._rounds(SIZES[0], 1)  # opens connections
        began, expected_s, cpu_s = time.perf_counter(), 0.0, 0.0
        times: list[MessageTime] = []
        for i, size in enumerate(SIZES):
            (spent_s,) = self.together.largest([time.perf_counter() - began])
            left_s = self.budget_s - spent_s
            if i < _ALWAYS or left_s >= _FEWEST * expected_s:
                # A later size takes longer; what is left now is shared out over all that come.
                fits = int(left_s / (len(SIZES) - i) / expected_s) if expected_s else _MOST
                taken, cpu_s = self._rounds(size, max(_FEWEST, min(_MOST, fits)))
                times.append(MessageTime(message_bytes=size, time_s=median(taken)))
                growth = SIZES[i + 1] / size if i + 1 < len(SIZES) else 1
                expected_s = growth * median(taken) * len(self.distances)
            self.advance()
        return LinkTimes(tuple(times), cpu_s / times[-1].message_bytes)

    def _rounds(self, nbytes: int, count: int) -> tuple[list[float], float]:
        """Return what an exchange took in each round, and the mean processor time."""
        together = self.together
        payload = torch.randint(0, 256, (nbytes,), dtype=torch.uint8).to(together.device)
        into = torch.zeros_like(payload) if payload.is_cpu else None
        taken = []
        together.largest([0.0])
        cpu_began = time.process_time()
        for _ in range(count):
            together.settle()
            began = time.perf_counter()
            for distance in self.distances:
                together.exchange(payload, distance, within=self.within, into=into)()
            together.settle()
            taken.append((time.perf_counter() - began) / len(self.distances))
        cpu_s = (time.process_time() - cpu_began) / count / len(self.distances)
        *taken, cpu_s = together.largest([*taken, cpu_s])
        return taken, cpu_s


def link_of(times: Sequence[MessageTime], sharing: int = 1) -> Link:
    """Return the link that ``sharing`` ranks used at once, each with these times.

    Sizes and bandwidth are those of all of them together.
    """
    smallest, largest = times[0], times[-1]
    transfer_s = max(largest.time_s - smallest.time_s, 1e-9)
    shared = tuple(t.model_copy(update={"message_bytes": t.message_bytes * sharing}) for t in times)
    return Link(
        latency_s=smallest.time_s,
        bandwidth_bytes_per_s=sharing * largest.message_bytes / transfer_s,
        measured=shared,
    )


def distances(groups: int, apart: int = 1) -> tuple[int, ...]:
    """Return how far a ring and a butterfly of ``groups`` members reach, in ranks.

    Args:
        groups: Members.
        apart: Ranks from one member to the next.
    """
    reach, left = {1}, groups
    while left > 1:
        left = -(-left // 2)
        reach.add(left)
    return tuple(apart * distance for distance in sorted(reach))
