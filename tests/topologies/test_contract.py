"""The contract of all topologies, by enumeration; a new topology is added to TOPOLOGIES."""

import pytest

from dynamiq.core.errors import ConfigurationError
from dynamiq.core.registry import topology_registry
from dynamiq.core.topology import Schedule
from dynamiq.topologies import Butterfly, Direct, Ring
from tests.contracts import topology as contract

TOPOLOGIES = (Ring(), Butterfly(), Direct())

every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.kind)


@pytest.mark.parametrize("world_size", contract.WORLD_SIZES)
@pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)
def test_contract(topology, world_size):
    contract.check(topology, world_size)


@pytest.mark.parametrize(
    "world_size",
    [
        pytest.param(n, marks=pytest.mark.soak if n > 100 else [], id=str(n))
        for n in contract.WORLD_SIZES
    ],
)
@pytest.mark.parametrize("topology", [Direct()], ids=lambda t: t.kind)
def test_contract_of_few_hops(topology, world_size):
    """Nothing else happens on more ranks, which take long to enumerate."""
    contract.check(topology, world_size)


@every_topology
def test_one_rank_does_nothing(topology):
    schedule = topology.schedule(1)

    assert (schedule.hops, schedule.steps(0), schedule.peers(0)) == ((), (), ())


@every_topology
@pytest.mark.parametrize("world_size", [0, -1])
def test_a_schedule_needs_a_rank(topology, world_size):
    with pytest.raises(ConfigurationError, match=f"at least one rank, got {world_size}"):
        topology.schedule(world_size)


@every_topology
def test_a_schedule_is_its_topology_at_a_world_size(topology):
    schedule = topology.schedule(6)

    assert schedule == Schedule(topology, 6)
    assert schedule.hops == topology.hops(6)
    assert schedule.steps(4) == topology.steps(6, 4)
    assert schedule == Schedule(topology, 6), "what it remembers is not part of it"
    assert hash(schedule) == hash(Schedule(topology, 6))


@every_topology
def test_every_topology_is_registered(topology):
    assert topology_registry.read(topology.to_dict()) == topology


@every_topology
@pytest.mark.timeout(5)
def test_thousands_of_ranks_are_planned_one_rank_at_a_time(topology):
    """One rank of 8192 is planned without the other ranks' n² messages."""
    n, rank = 8192, 4097

    hops = topology.hops(n)
    steps = topology.steps(n, rank)

    assert sum(hop.transfers for hop in hops if hop.reduce) == n - 1
    for reduce in (True, False):
        assert sum(len(s.sends) for s in steps if s.reduce is reduce) == n - 1
        assert sum(len(s.receives) for s in steps if s.reduce is reduce) == n - 1
    for number in (0, len(steps) // 2, len(steps) - 1):
        step = steps[number]
        assert topology.steps(n, step.to)[number].receives == step.sends
        assert all(hops[m.hop].summed == m.summed for m in step.sends + step.receives)
