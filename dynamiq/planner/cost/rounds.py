"""The rounds of a schedule, and what they do to messages; alike ones of a long ring as one."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from dynamiq.core.topology import Schedule, Step

_MESSAGES = 16
"""Of a round with more, so many are looked at."""


@dataclass(frozen=True)
class Round:
    """Rounds that follow each other and are taken to be alike.

    Attributes:
        step: One of them, from the middle.
        times: How many.
        offset: From a rank to the one it sends to, modulo the number of ranks.
        sampled: Of ``step.sends``, all or some that stand for all.
        compressed: Messages that a rank compresses before it sends, per round.
        recompressed: Messages received that are added and sent on in another payload.
        accumulated: Messages received that are added.
    """

    step: Step
    times: int
    offset: int
    sampled: slice
    compressed: int
    recompressed: int
    accumulated: int

    @property
    def sends(self) -> int:
        """Messages sent in each of the rounds."""
        return len(self.step.sends)

    @property
    def receives(self) -> int:
        """Messages received in each of the rounds."""
        return len(self.step.receives)


@lru_cache(maxsize=256)
def rounds_of(schedule: Schedule, rank: int, gather: bool, most: int) -> tuple[Round, ...]:
    """Return the rounds of one rank's reduce-scatter and all-gather.

    Args:
        schedule: Of one level.
        rank: Within it.
        gather: Whether the finished sum is sent on, so that it is compressed.
        most: Up to how many rounds of each pass are looked at one by one; of more only the first
            and the last two are.
    """
    steps = schedule.steps(rank)
    reduce = [s for s in steps if s.reduce]
    outgoing = {m.chunk for step in reduce for m in step.sends}
    if gather:
        outgoing.add(rank)
    last = {m.chunk: number for number, step in enumerate(reduce) for m in step.receives}

    def summary(step: Step, number: int, times: int) -> Round:
        offset = (step.to - rank) % schedule.world_size
        stride = -(-len(step.sends) // _MESSAGES) or 1
        if not step.reduce:
            return Round(step, times, offset, slice(None, None, stride), 0, 0, 0)
        on = sum(m.chunk in outgoing and last[m.chunk] == number for m in step.receives)
        fresh = sum(m.chunk not in last for m in step.sends)
        kept = len(step.receives) - on
        return Round(step, times, offset, slice(None, None, stride), fresh, on, kept)

    found = []
    for one_pass in (reduce, [s for s in steps if not s.reduce]):
        for start, stop in _spans(len(one_pass), most):
            middle = (start + stop) // 2
            found.append(summary(one_pass[middle], middle, stop - start))
    return tuple(found)


def _spans(count: int, most: int) -> list[tuple[int, int]]:
    """Cut range(count) into at most ``most`` parts: the two at either end alone if that is less."""
    if count <= most:
        return [(i, i + 1) for i in range(count)]
    inner = max(1, most - 4)
    cuts = [2 + (count - 4) * i // inner for i in range(inner + 1)]
    ends = [(0, 1), (1, 2)], [(count - 2, count - 1), (count - 1, count)]
    return [*ends[0], *pairwise(cuts), *ends[1]]
