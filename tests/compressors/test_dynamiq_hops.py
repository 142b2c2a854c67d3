"""The model of a schedule's noise: read off every chunk's true tree, and simulated."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from dynamiq import Butterfly, Direct, Ring
from dynamiq.compressors.dynamiq.hops import HopModel

SIZES = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16)
SCHEDULES = [t.schedule(n) for t in (Ring(), Butterfly(), Direct()) for n in SIZES]
UNIFORM = [s for s in SCHEDULES if s.topology.kind != "butterfly" or s.world_size in {2, 4, 8, 16}]
"""Where all sums of a class are made alike."""
MIXED = [s for s in SCHEDULES if s not in UNIFORM]


def named(schedule):
    return f"{schedule.topology.kind}-{schedule.world_size}"


every_schedule = pytest.mark.parametrize("schedule", SCHEDULES, ids=named)


@dataclass(frozen=True)
class Sent:
    """A message of one chunk and the messages that its sender had added before."""

    hop: int
    summed: int
    sender: int
    inputs: tuple["Sent", ...]


def trees(schedule):
    """Return the finished sum of every chunk, as the steps of all ranks make it."""
    n = schedule.world_size
    received = defaultdict(list)
    finished = {}
    rounds = zip(*(schedule.steps(rank) for rank in range(n)), strict=True)
    for steps in rounds:
        if not steps[0].reduce:
            continue
        arriving = []
        for rank, step in enumerate(steps):
            for m in step.sends:
                inputs = tuple(received.pop((rank, m.chunk), ()))
                arriving.append(((step.to, m.chunk), Sent(m.hop, m.summed, rank, inputs)))
        for place, message in arriving:
            received[place].append(message)
    for chunk in range(n):
        inputs = tuple(received.pop((chunk, chunk)))
        finished[chunk] = Sent(len(schedule.hops) - 1, n, chunk, inputs)
    assert not received, "every message has been added to one that was sent, or to a finished sum"
    return list(finished.values())


def below(node):
    """Yield a node and all messages below it."""
    yield node
    for message in node.inputs:
        yield from below(message)


def crossings(schedule):
    """Return how often a chunk's payload crosses a link, by hop, all ranks' sends counted."""
    n = schedule.world_size
    count = Counter(m.hop for r in range(n) for step in schedule.steps(r) for m in step.sends)
    return {hop: total / n for hop, total in count.items()}


@every_schedule
def test_classes_are_the_trees(schedule):
    """Messages, transfers and inputs on average over all chunks; rank 0 alone was asked."""
    model = HopModel.of(schedule, True)
    n = schedule.world_size
    nodes = defaultdict(list)
    for tree in trees(schedule):
        for node in below(tree):
            nodes[node.hop].append(node)

    assert model.of_hop == tuple(range(len(schedule.hops)))
    assert len(model.classes) == len(nodes)
    for hop, c in enumerate(model.classes):
        here = nodes[hop]
        assert {node.summed for node in here} == {c.summed}
        assert c.length == 1
        assert c.messages == len(here) / n
        assert c.transfers == crossings(schedule)[hop]
        inputs = Counter(message.hop for node in here for message in node.inputs)
        assert dict(c.inputs) == pytest.approx({h: k / len(here) for h, k in inputs.items()})
    assert sum(c.messages for c in model.classes) == n
    assert sum(c.transfers for c in model.classes) == 2 * (n - 1)


def test_classes_that_are_written_down():
    """A butterfly of 12: six sums of one rank, three of two, two of four; of 7, rounds mix."""
    by_summed = {
        n: {c.summed: c.messages for c in HopModel.of(Butterfly().schedule(n), True).classes[:-1]}
        for n in (5, 7, 12)
    }
    assert by_summed[5] == {1: 3, 2: 1}
    assert by_summed[12] == {1: 6, 2: 3, 4: 2}
    assert set(by_summed[7]) == {1, 2, 3}


@pytest.mark.parametrize("gather", [True, False])
def test_what_is_sent(gather):
    """Without an all-gather the finished sums are not quantised."""
    model = HopModel.of(Ring().schedule(5), gather)
    assert (len(model.classes), model.sent) == (5, 5 if gather else 4)


def numbers(model, seed=0):
    """Return (errors, energies, π) of three rows, for each class."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    pi = torch.tensor([1.0, 1.9, 0.6], dtype=torch.float64)
    errors = 10 ** -(2.5 * uniform(model.sent, 3))
    energies = model.energies(1.0 + uniform(3), torch.tensor([0.0, 0.14, 1.0]).double())
    return errors, energies, pi


def noise_of(node, errors, energies, pi, extra=None):
    """Return the noise of one chunk's sum before it is quantised, message by message.

    ``extra`` is (message, what is added to its error).
    """
    noise = torch.zeros_like(pi)
    for m in node.inputs:
        arrived = noise_of(m, errors, energies, pi, extra)
        noise = noise + arrived + errors[m.hop] * (energies[m.hop] + pi * arrived)
        if extra is not None and extra[0] is m:
            noise = noise + extra[1]
    return noise


def finished_noise(node, errors, energies, pi, extra=None):
    """Return the noise of the result, after the gather message's own."""
    noise = noise_of(node, errors, energies, pi, extra)
    return noise + errors[node.hop] * (energies[node.hop] + pi * noise)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=named)
def test_noise_that_arrives(schedule):
    """The mean over the true trees: exactly where trees are alike, nearly where they are not."""
    model = HopModel.of(schedule, True)
    errors, energies, pi = numbers(model)
    noise, peaked = model.arriving(energies, errors, pi)
    assert torch.allclose(peaked, pi * noise, rtol=1e-12)
    nodes = defaultdict(list)
    for tree in trees(schedule):
        for node in below(tree):
            nodes[node.hop].append(noise_of(node, errors, energies, pi))
    tolerance = 1e-12 if schedule in UNIFORM else 0.05
    for hop, found in nodes.items():
        assert torch.allclose(noise[hop], torch.stack(found).mean(0), rtol=tolerance), hop


@pytest.mark.parametrize("schedule", SCHEDULES, ids=named)
def test_sensitivity_is_what_a_perturbed_message_does_to_the_result(schedule):
    """The error of each message in turn grows a little; the result's grows 1 + π times that."""
    model = HopModel.of(schedule, True)
    errors, energies, pi = numbers(model)
    growth = {}

    def visitor(h, sensitivity):
        growth[h] = 1.0 + pi * sensitivity
        return errors[h]

    model.visit(pi, visitor)
    assert torch.equal(growth[model.sent - 1], torch.ones_like(pi)), "nothing follows the last"

    tree, extra = trees(schedule)[0], 1e-3
    base = finished_noise(tree, errors, energies, pi)
    found = defaultdict(list)
    for m in below(tree):
        if m is not tree:
            grown = finished_noise(tree, errors, energies, pi, (m, extra))
            found[m.hop].append((grown - base) / extra)
    tolerance = 1e-9 if schedule in UNIFORM else 0.05
    for hop, values in found.items():
        assert torch.allclose(growth[hop], torch.stack(values).mean(0), rtol=tolerance), hop


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("schedule", MIXED, ids=named)
def test_sensitivity_is_the_derivative_of_the_modelled_noise(schedule, gather):
    """Also where a class's sums are made in different ways, and without an all-gather."""
    model = HopModel.of(schedule, gather)
    errors, energies, pi = numbers(model)

    def total(errors):
        noise, peaked = (part[-1] for part in model.arriving(energies, errors, pi))
        return noise + errors[-1] * (energies[-1] + peaked) if gather else noise

    peaked = model.arriving(energies, errors, pi)[1]
    growth = {}

    def visitor(h, sensitivity):
        growth[h] = 1.0 + pi * sensitivity
        return errors[h]

    model.visit(pi, visitor)
    for h in range(model.sent):
        step = torch.zeros_like(errors)
        step[h] = 1e-6
        slope = (total(errors + step) - total(errors - step)) / 2e-6
        own = model.classes[h].messages * (energies[h] + peaked[h])
        assert torch.allclose(slope, own * growth[h], rtol=1e-6), h


@pytest.mark.parametrize(
    "schedule", [Ring().schedule(5), Butterfly().schedule(8), Direct().schedule(5)], ids=named
)
@pytest.mark.parametrize("correlation", [0.0, 0.3])
def test_noise_of_numbers_that_really_are_added_up(schedule, correlation):
    """Vectors of correlated ranks; a message gains noise of e times what it carries."""
    model = HopModel.of(schedule, True)
    n, d = schedule.world_size, 40_000
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = correlation**0.5 * normal(d) + (1 - correlation) ** 0.5 * normal(n, d)
    errors = torch.linspace(0.05, 0.3, model.sent, dtype=torch.float64)[:, None]

    def carried(node):
        total = x[node.sender].clone()
        for m in node.inputs:
            total += sent(m)
        return total

    def sent(node):
        total = carried(node)
        return total + (errors[node.hop] * total.square().mean()).sqrt() * normal(d)

    energies = model.energies(
        torch.tensor([float(n)]).double(), torch.tensor([correlation]).double()
    )
    noise = model.arriving(energies, errors, torch.ones(1, dtype=torch.float64))[0]
    for hop in range(1, len(model.classes)):
        chunks = [node for tree in trees(schedule) for node in below(tree) if node.hop == hop]
        found = []
        for node in chunks:
            exact = sum(x[m.sender] for m in below(node))
            found.append((carried(node) - exact).square().mean().item())
            assert exact.square().mean().item() == pytest.approx(energies[hop].item(), rel=0.05)
        assert sum(found) / len(found) == pytest.approx(noise[hop].item(), rel=0.03)


@pytest.mark.parametrize("n", [32, 33, 64, 1024, 8192])
def test_long_rings_are_taken_together(n):
    """Hops of a group follow each other and sum about as many ranks; the total is that of all."""
    schedule = Ring().schedule(n)
    model = HopModel.of(schedule, True)
    if n == 32:
        assert len(model.classes) == 32
    else:
        assert len(model.classes) < min(n, 12 + math.log(n) / math.log(1.25))
    assert sum(c.length for c in model.classes) == n == len(model.of_hop)
    assert all(b - a in {0, 1} for a, b in pairwise(model.of_hop))
    assert sum(c.transfers for c in model.classes) == 2 * (n - 1)
    assert sum(c.messages for c in model.classes) == n
    by_class = defaultdict(list)
    for hop, c in enumerate(model.of_hop):
        by_class[c].append(schedule.hops[hop].summed)
    for c, summed in by_class.items():
        assert sum(summed) / len(summed) == model.classes[c].summed
        assert max(summed) <= 1.25 * min(summed)


@pytest.mark.parametrize("n", [64, 256, 1024])
@pytest.mark.parametrize("correlation", [0.0, 0.14, 1.0])
def test_a_grouped_ring_is_nearly_the_whole_one(n, correlation):
    """Noise of all hops, one after the other, with the errors of their classes."""
    model = HopModel.of(Ring().schedule(n), True)
    correlation, pi = torch.tensor([correlation]).double(), torch.tensor([1.7]).double()
    one = torch.ones(1, dtype=torch.float64)
    # About what an allocation does: errors fall with the energy of the partial sum.
    energies = model.energies(one, correlation)
    errors = (0.02 / n / energies * energies[-1]).clamp(max=0.1)

    alone = torch.zeros(1, dtype=torch.float64)
    for k, c in enumerate(model.of_hop[:-1], 1):
        energy = (k + k * (k - 1) * correlation) / n
        alone = alone + errors[c] * (energy + pi * alone)
    assert model.arriving(energies, errors, pi)[0][-1].item() == pytest.approx(
        alone.item(), rel=0.01
    )


@pytest.mark.parametrize("n", [64, 1024])
def test_sensitivity_of_a_grouped_ring(n):
    """To noise that arrives before a class: it grows 1 + π e times at every hop that follows."""
    model = HopModel.of(Ring().schedule(n), True)
    pi = torch.tensor([1.4]).double()
    errors = torch.linspace(0.05, 1e-3, len(model.classes)).double()[:, None] / n
    growth = {}

    def visitor(h, sensitivity):
        growth[h] = 1.0 + pi * sensitivity
        return errors[h]

    model.visit(pi, visitor)
    expected = torch.ones(1, dtype=torch.float64)
    for h in reversed(range(model.sent)):
        assert torch.allclose(growth[h], expected, rtol=1e-9)
        expected = expected * (1.0 + pi * errors[h]) ** model.classes[h].length


def test_energies():
    """One rank: F/n; all ranks alike: n F; independent ones: F."""
    model = HopModel.of(Ring().schedule(4), True)
    energy = torch.tensor([8.0, 8.0, 8.0]).double()
    energies = model.energies(energy, torch.tensor([0.0, 0.5, 1.0]).double())
    assert energies[:, 0].tolist() == [2.0, 4.0, 6.0, 8.0]
    assert energies[:, 1].tolist() == [2.0, 6.0, 12.0, 20.0]
    assert energies[:, 2].tolist() == [2.0, 8.0, 18.0, 32.0]
