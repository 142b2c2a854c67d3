"""The path of one chunk against all messages of all ranks."""

import pytest

from dynamiq.core.topology import Topology
from dynamiq.simulation.tree import tree
from dynamiq.topologies import Butterfly, Direct, Ring


class Elsewhere(Topology):
    """A ring that nobody knows to be the same for all ranks."""

    kind: str = "elsewhere"

    def hops(self, world_size):
        return Ring().hops(world_size)

    def steps(self, world_size, rank):
        return Ring().steps(world_size, rank)


every_topology = pytest.mark.parametrize(
    "topology", [Ring(), Butterfly(), Direct(), Elsewhere()], ids=lambda t: t.kind
)


@every_topology
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7, 8, 12, 13, 16, 33])
def test_every_message_of_the_chunk_is_there_in_order(topology, world_size):
    schedule = topology.schedule(world_size)
    nodes = tree(schedule)
    sent, received = {}, {rank: [] for rank in range(world_size)}
    for rank in range(world_size):
        for step in schedule.steps(rank):
            if step.reduce:
                sent.update((rank, m) for m in step.sends if m.chunk == 0)
                received[rank] += [m for m in step.receives if m.chunk == 0]

    found = {node.message.sender: node for node in nodes}
    assert found.keys() == set(range(world_size))
    assert found[0].message == schedule.gather_message(0)
    assert {rank: node.message for rank, node in found.items() if rank} == sent
    assert {rank: list(node.inputs) for rank, node in found.items()} == received


@every_topology
def test_inputs_come_before_whom_they_are_for(topology):
    seen = set()
    for node in tree(topology.schedule(19)):
        assert seen.issuperset(m.sender for m in node.inputs)
        seen.add(node.message.sender)
    assert node.message.summed == 19


def test_thousands_of_ranks_are_quick():
    assert len(tree(Ring().schedule(8192))) == 8192
