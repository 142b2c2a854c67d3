"""Direct exchange: every rank sends every chunk straight to its owner, two compressions in all."""

from typing import Literal

from dynamiq.core.message import Message
from dynamiq.core.registry import topology_registry
from dynamiq.core.topology import Hop, Step, Topology


@topology_registry.register
class Direct(Topology):
    """One-hop reduce-scatter and all-gather between all pairs, for every world size.

    In round s of each half, s from 1 to n - 1, rank r sends to r + s and receives from r - s, so
    that every round is a permutation and no rank is sent to by two. In the reduce-scatter it sends
    its own entries of chunk r + s, in the all-gather the finished chunk r. An entry is compressed
    twice in sequence, the least of all topologies. The price: every rank talks to every other one,
    n (n - 1) connections that share whatever links there are, and an owner adds n - 1 payloads.
    """

    kind: Literal["direct"] = "direct"

    def hops(self, world_size: int) -> tuple[Hop, ...]:
        """Single ranks' entries, which each chunk sends n - 1 times, then the all-gather."""
        if world_size == 1:
            return ()
        return (Hop(1, world_size - 1, True), Hop(world_size, world_size - 1, False))

    def steps(self, world_size: int, rank: int) -> tuple[Step, ...]:
        """Rounds of one rank: n - 1 of the reduce-scatter, n - 1 of the all-gather."""
        n = world_size

        def own(sender: int, chunk: int) -> tuple[Message, ...]:
            return (Message(chunk, sender, 1, 0),)

        def finished(chunk: int) -> tuple[Message, ...]:
            return (Message(chunk, chunk, n, 1),)

        peers = [((rank + s) % n, (rank - s) % n) for s in range(1, n)]
        return (
            *(Step(to, own(rank, to), source, own(source, rank), True) for to, source in peers),
            *(Step(to, finished(rank), source, finished(source), False) for to, source in peers),
        )
