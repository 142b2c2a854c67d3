"""The ring: 2(n - 1) rounds between neighbours, the least that every link can carry."""

from typing import Literal

from dynamiq.core.message import Message
from dynamiq.core.registry import topology_registry
from dynamiq.core.topology import Hop, Step, Topology


@topology_registry.register
class Ring(Topology):
    """Reduce-scatter and all-gather along a ring, for every world size.

    Rank r sends to r + 1 and receives from r - 1. In round t of the reduce-scatter it sends its
    partial sum of t + 1 ranks of chunk r - 1 - t, so that rank r ends with chunk r; in round t
    of the all-gather it forwards chunk r - t. An entry is compressed n times in sequence, n - 1
    in the reduce-scatter and once by its owner.
    """

    kind: Literal["ring"] = "ring"

    def hops(self, world_size: int) -> tuple[Hop, ...]:
        """One hop per number of summed ranks, each crossed once, then the all-gather."""
        if world_size == 1:
            return ()
        reduce = tuple(Hop(k, 1, True) for k in range(1, world_size))
        return (*reduce, Hop(world_size, world_size - 1, False))

    def steps(self, world_size: int, rank: int) -> tuple[Step, ...]:
        """Rounds of one rank: n - 1 of the reduce-scatter, n - 1 of the all-gather."""
        n = world_size
        to, source = (rank + 1) % n, (rank - 1) % n

        def partial(sender: int, t: int) -> Message:
            return Message((sender - 1 - t) % n, sender, t + 1, t)

        def finished(sender: int, t: int) -> Message:
            chunk = (sender - t) % n
            return Message(chunk, chunk, n, n - 1)

        rounds = range(n - 1)
        return (
            *(Step(to, (partial(rank, t),), source, (partial(source, t),), True) for t in rounds),
            *(
                Step(to, (finished(rank, t),), source, (finished(source, t),), False)
                for t in rounds
            ),
        )
