"""The path of one chunk: which rank adds whose partial sum, and what it sends on.

A schedule of n ranks has about n² messages; those of one chunk are a tree of n.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from dynamiq.core.message import Message
from dynamiq.core.topology import Schedule, Topology
from dynamiq.topologies import Butterfly, Direct, Ring

_CIRCULANT: tuple[type[Topology], ...] = (Ring, Butterfly, Direct)
"""Schedules in which rank r does with chunk c + r what rank 0 does with chunk c."""


@dataclass(frozen=True)
class Node:
    """One rank's part in chunk 0.

    Attributes:
        message: What it compresses; the owner's goes to everyone.
        inputs: What it adds to its own entries first, in order of arrival.
    """

    message: Message
    inputs: tuple[Message, ...]


def tree(schedule: Schedule) -> list[Node]:
    """Return the nodes of chunk 0, each after those that send to it, its owner last."""
    arrivals: dict[int, list[tuple[int, Message]]] = defaultdict(list)
    outgoing = {0: schedule.gather_message(0)}
    for round_number, to, message in _sends(schedule):
        arrivals[to].append((round_number, message))
        outgoing[message.sender] = message
    inputs = {
        rank: tuple(message for _, message in sorted(found, key=lambda pair: pair[0]))
        for rank, found in arrivals.items()
    }
    nodes, waiting = [], [0]
    while waiting:
        rank = waiting.pop()
        nodes.append(Node(outgoing[rank], inputs.get(rank, ())))
        waiting.extend(message.sender for message in nodes[-1].inputs)
    return nodes[::-1]


def _sends(schedule: Schedule) -> Iterator[tuple[int, int, Message]]:
    """Yield (round, receiver, message) of chunk 0's partial sums."""
    n = schedule.world_size
    if isinstance(schedule.topology, _CIRCULANT):
        for number, step in enumerate(schedule.steps(0)):
            for m in step.sends if step.reduce else ():
                rank = -m.chunk % n
                yield number, (rank + step.to) % n, Message(0, rank, m.summed, m.hop)
        return
    for rank in range(n):
        for number, step in enumerate(schedule.steps(rank)):
            for m in step.sends if step.reduce else ():
                if m.chunk == 0:
                    yield number, step.to, m
