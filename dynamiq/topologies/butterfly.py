"""The butterfly: ⌈log₂ n⌉ rounds each way and n - 1 blocks per rank, for every world size.

Source: J. L. Träff, arXiv 2410.14234. For a power of two it has the depth and volume of
recursive halving and doubling.
"""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from dynamiq.core.message import Message
from dynamiq.core.registry import topology_registry
from dynamiq.core.topology import Hop, Step, Topology


@topology_registry.register
class Butterfly(Topology):
    """Reduce-scatter and all-gather with circulant halving, for every world size.

    Position p of rank r's rotated list is chunk (r + p) mod n. With s positions left and
    h = ⌈s/2⌉, rank r sends its positions h to s - 1 to rank r + h and adds what rank r - h
    sends to its positions 0 to s - h - 1, until one position is left: rank r ends with chunk r.
    The all-gather runs the rounds backwards. An entry is compressed at most ⌈log₂ n⌉ + 1 times
    in sequence. When n is no power of two a round mixes sums of different numbers of ranks.
    """

    kind: Literal["butterfly"] = "butterfly"

    def hops(self, world_size: int) -> tuple[Hop, ...]:
        """One hop per number of summed ranks that occurs, then the all-gather."""
        if world_size == 1:
            return ()
        sent = Counter(k for counts in _summed(world_size) for k in counts)
        reduce = tuple(Hop(k, sent[k], True) for k in sorted(sent))
        return (*reduce, Hop(world_size, world_size - 1, False))

    def steps(self, world_size: int, rank: int) -> tuple[Step, ...]:
        """Rounds of one rank: ⌈log₂ n⌉ of the reduce-scatter, as many of the all-gather."""
        n = world_size
        hop_of = {hop.summed: i for i, hop in enumerate(self.hops(n)) if hop.reduce}
        halvings = tuple(pairwise(_sizes(n)))

        def partials(sender: int, half: int, counts: tuple[int, ...]) -> tuple[Message, ...]:
            return tuple(
                Message((sender + half + p) % n, sender, k, hop_of[k]) for p, k in enumerate(counts)
            )

        def finished(first: int, count: int) -> tuple[Message, ...]:
            chunks = ((first + p) % n for p in range(count))
            return tuple(Message(c, c, n, len(hop_of)) for c in chunks)

        reduce = []
        for (_, half), counts in zip(halvings, _summed(n), strict=True):
            to, source = (rank + half) % n, (rank - half) % n
            sends, receives = partials(rank, half, counts), partials(source, half, counts)
            reduce.append(Step(to, sends, source, receives, True))
        gather = []
        for size, half in reversed(halvings):
            to, source = (rank - half) % n, (rank + half) % n
            sends, receives = finished(rank, size - half), finished(source, size - half)
            gather.append(Step(to, sends, source, receives, False))
        return (*reduce, *gather)


def _sizes(world_size: int) -> list[int]:
    """Return how many positions are left before each round, and 1 at the end."""
    sizes = [world_size]
    while sizes[-1] > 1:
        sizes.append((sizes[-1] + 1) // 2)
    return sizes


@lru_cache(maxsize=64)
def _summed(world_size: int) -> tuple[tuple[int, ...], ...]:
    """Return, per reduce round, how many ranks each sent position sums (equal on all ranks)."""
    counts = [1] * world_size
    rounds = []
    for size, half in pairwise(_sizes(world_size)):
        sent = tuple(counts[half:size])
        rounds.append(sent)
        for position, k in enumerate(sent):
            counts[position] += k
        del counts[half:]
    return tuple(rounds)
