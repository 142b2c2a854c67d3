"""What every topology must keep, as functions of a topology and a world size.

``simulate`` runs all ranks' steps with sets of ranks in place of numbers, so that a contribution
that is lost, counted twice, or sent too early shows. A law fails by an assertion. For a new
topology:

    @pytest.mark.parametrize("world_size", contract.WORLD_SIZES)
    def test_contract(world_size):
        contract.check(Mine(), world_size)
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from dynamiq.core.message import Message
from dynamiq.core.topology import Schedule, Step, Topology

WORLD_SIZES = (*range(1, 34), 64, 100, 128, 257)


@dataclass
class Rank:
    """One rank during the simulation: what its partial sums contain, and what it holds."""

    steps: tuple[Step, ...]
    sums: list[int]
    """Per chunk, the ranks in the partial sum, as bits."""
    depths: list[int]
    """Per chunk, how many compressions in sequence its partial sum has been through."""
    compressed: set[int] = field(default_factory=set)
    finished: dict[int, int] = field(default_factory=dict)
    """Chunk to depth, of the finished chunks this rank holds."""
    received: Counter[int] = field(default_factory=Counter)
    """How often each finished chunk was received."""


@dataclass(frozen=True)
class Trace:
    """What the simulation saw."""

    ranks: list[Rank]
    sent: list[tuple[Step, Message]]
    """Everything sent, all ranks."""


@lru_cache(maxsize=1)
def simulate(topology: Topology, world_size: int) -> Trace:
    """Run all ranks with sets of ranks as values.

    A step ends when its own messages were taken and the expected ones came, where a message is
    taken only by a rank that has reached the step that expects it: no link needs a buffer.
    """
    schedule = topology.schedule(world_size)
    ranks = [
        Rank(schedule.steps(r), [1 << r] * world_size, [0] * world_size) for r in range(world_size)
    ]
    posted_sends: dict[tuple[int, int], list[tuple[Message, int, int]]] = defaultdict(list)
    posted_receives: Counter[tuple[int, int]] = Counter()
    taken: Counter[tuple[int, int]] = Counter()
    sent = []
    position = [-1] * world_size

    def post(r: int) -> None:
        position[r] += 1
        if position[r] == len(ranks[r].steps):
            return
        step = ranks[r].steps[position[r]]
        for m in step.sends:
            posted_sends[r, step.to].append((m, *_send(schedule, ranks[r], r, step, m)))
            sent.append((step, m))
        posted_receives[step.source, r] += len(step.receives)

    def complete(r: int) -> bool:
        step = ranks[r].steps[position[r]]
        link = (step.source, r)
        wanted = len(step.receives)
        if len(posted_sends[link]) < taken[link] + wanted:
            return False
        if step.sends and posted_receives[r, step.to] < len(posted_sends[r, step.to]):
            return False
        arrived = posted_sends[link][taken[link] : taken[link] + wanted]
        taken[link] += wanted
        for expected, (m, ranks_in_it, depth) in zip(step.receives, arrived, strict=True):
            assert m == expected, f"rank {r} expects {expected} from rank {step.source}, got {m}"
            _receive(ranks[r], r, step, m, ranks_in_it, depth)
        return True

    running = list(range(world_size))
    for r in running:
        post(r)
    running = [r for r in running if ranks[r].steps]
    while running:
        done = [r for r in running if complete(r)]
        assert done, f"ranks {running} wait for each other, at steps {position}"
        for r in done:
            post(r)
        running = [r for r in running if position[r] < len(ranks[r].steps)]
    for link, messages in posted_sends.items():
        assert len(messages) == taken[link], f"a message from {link[0]} to {link[1]} is not awaited"
    return Trace(ranks, sent)


def _send(schedule: Schedule, rank: Rank, r: int, step: Step, m: Message) -> tuple[int, int]:
    """Check one message and return what it carries: the ranks in the sum, and its depth."""
    assert step.to != r, f"rank {r} sends to itself"
    if step.reduce:
        assert m.sender == r, f"{m} is compressed by rank {r}"
        assert m.chunk not in rank.compressed, f"rank {r} compresses chunk {m.chunk} twice"
        assert m.chunk != r, f"rank {r} gives its own chunk away"
        rank.compressed.add(m.chunk)
        carried = rank.sums[m.chunk]
        assert m.summed == carried.bit_count(), f"{m} sums {carried.bit_count()} ranks"
        return carried, rank.depths[m.chunk] + 1
    if m.chunk == r and r not in rank.finished:
        rank.finished[r] = rank.depths[r] + 1
    assert m == schedule.gather_message(m.chunk)
    assert m.chunk in rank.finished, f"rank {r} sends chunk {m.chunk} before it has it"
    return (1 << schedule.world_size) - 1, rank.finished[m.chunk]


def _receive(rank: Rank, r: int, step: Step, m: Message, carried: int, depth: int) -> None:
    assert step.source != r, f"rank {r} receives from itself"
    if step.reduce:
        assert m.chunk not in rank.compressed, f"rank {r} adds to chunk {m.chunk} after sending it"
        assert not rank.sums[m.chunk] & carried, f"chunk {m.chunk} at rank {r}: a rank counts twice"
        rank.sums[m.chunk] |= carried
        rank.depths[m.chunk] = max(rank.depths[m.chunk], depth)
    else:
        rank.received[m.chunk] += 1
        rank.finished[m.chunk] = depth


def every_contribution_arrives_once(topology: Topology, world_size: int) -> None:
    """After the reduce-scatter rank r holds chunk r with every rank in it exactly once."""
    everyone = (1 << world_size) - 1
    for r, rank in enumerate(simulate(topology, world_size).ranks):
        assert rank.sums[r] == everyone


def every_rank_compresses_every_foreign_chunk_once(topology: Topology, world_size: int) -> None:
    """Each rank's entries must leave it, and may do so once: n - 1 messages per rank."""
    for r, rank in enumerate(simulate(topology, world_size).ranks):
        assert rank.compressed == set(range(world_size)) - {r}


def every_rank_receives_every_finished_chunk_once(topology: Topology, world_size: int) -> None:
    """After the all-gather every rank holds every chunk, and none came twice."""
    for r, rank in enumerate(simulate(topology, world_size).ranks):
        assert rank.received == Counter(set(range(world_size)) - {r})


def every_rank_sends_as_much_as_it_receives(topology: Topology, world_size: int) -> None:
    """No link carries more than another: n - 1 blocks from every rank, in each half."""
    for rank in simulate(topology, world_size).ranks:
        for half in (True, False):
            sent = sum(len(s.sends) for s in rank.steps if s.reduce is half)
            received = sum(len(s.receives) for s in rank.steps if s.reduce is half)
            assert sent == received == world_size - 1


def the_reduce_scatter_comes_first(topology: Topology, world_size: int) -> None:
    """So that a reduce-scatter is a prefix of the all-reduce."""
    for rank in simulate(topology, world_size).ranks:
        halves = [step.reduce for step in rank.steps]
        assert halves == sorted(halves, reverse=True)


def messages_name_their_hop(topology: Topology, world_size: int) -> None:
    """A message's hop is the entry of ``hops`` with its ``summed``; the all-gather's the last."""
    hops = topology.hops(world_size)
    for step, m in simulate(topology, world_size).sent:
        assert hops[m.hop].reduce is step.reduce
        assert hops[m.hop].summed == m.summed
        assert (m.hop == len(hops) - 1) is not step.reduce


def hops_ascend(topology: Topology, world_size: int) -> None:
    """One hop per number of summed ranks, ascending, then the all-gather; none for one rank."""
    hops = topology.hops(world_size)
    if world_size == 1:
        assert hops == ()
        return
    *reduce, gather = hops
    sums = [hop.summed for hop in reduce]
    assert all(hop.reduce for hop in reduce)
    assert sums == sorted(set(sums))
    assert sums[0] == 1
    assert (gather.summed, gather.reduce) == (world_size, False)


def hops_count_the_transfers_of_every_chunk(topology: Topology, world_size: int) -> None:
    """``transfers`` is how often a chunk crosses a link in the hop, the same for every chunk."""
    hops = topology.hops(world_size)
    counted = Counter((m.chunk, m.hop) for _, m in simulate(topology, world_size).sent)
    expected = {(c, h): hop.transfers for c in range(world_size) for h, hop in enumerate(hops)}
    assert counted == expected
    for half in (True, False):
        assert sum(hop.transfers for hop in hops if hop.reduce is half) == world_size - 1


def peers_are_mutual(topology: Topology, world_size: int) -> None:
    """The peers with whom a call's header is exchanged expect one, too."""
    schedule = topology.schedule(world_size)
    peers = [schedule.peers(r) for r in range(world_size)]
    for r, mine in enumerate(peers):
        assert mine == tuple(sorted(set(mine) - {r}))
        assert all(r in peers[peer] for peer in mine)


def schedules_are_values(topology: Topology, world_size: int) -> None:
    """The same arguments give equal hops and steps, and a description is read back as itself."""
    again = type(topology).model_validate(topology.to_dict())
    assert again == topology
    assert again.schedule(world_size) == topology.schedule(world_size)
    assert again.hops(world_size) == topology.hops(world_size)
    for r in {0, world_size // 2, world_size - 1}:
        assert again.steps(world_size, r) == topology.steps(world_size, r)


def depth(topology: Topology, world_size: int) -> int:
    """Return how many compressions in sequence an entry goes through at most."""
    ranks = simulate(topology, world_size).ranks
    return max(max(rank.finished.values(), default=0) for rank in ranks)


LAWS: tuple[Callable[[Topology, int], None], ...] = (
    every_contribution_arrives_once,
    every_rank_compresses_every_foreign_chunk_once,
    every_rank_receives_every_finished_chunk_once,
    every_rank_sends_as_much_as_it_receives,
    the_reduce_scatter_comes_first,
    messages_name_their_hop,
    hops_ascend,
    hops_count_the_transfers_of_every_chunk,
    peers_are_mutual,
    schedules_are_values,
)


def check(topology: Topology, world_size: int) -> None:
    """Check all laws."""
    for law in LAWS:
        law(topology, world_size)
