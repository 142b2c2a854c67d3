"""Errors of single hops: measured in passing, against each hop computed by hand."""

import pytest
import torch

from dynamiq.compressors import DynamiQCompressor, THCCompressor, Uncompressed
from dynamiq.core.message import Call
from dynamiq.core.metrics import measure_error, simulate
from dynamiq.simulation.observed import Log, Observed
from dynamiq.topologies import Butterfly, Ring
from tests.contracts.compressor import same_bits, sample
from tests.probes import NonZeroBlocks

every_topology = pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)


def observe(x, compressor, topology, chunks=None, call=None):
    log = Log(range(len(x)) if chunks is None else chunks)
    ended = simulate(x, Observed.by(compressor, log), topology, call or Call())
    return ended, log


@every_topology
@pytest.mark.parametrize(
    "compressor",
    [Uncompressed("bf16"), DynamiQCompressor.paper(rounding="stochastic"), NonZeroBlocks()],
    ids=lambda c: c.kind,
)
def test_a_look_changes_nothing(topology, compressor):
    x = sample(5, 5000)
    ended, log = observe(x, compressor, topology, call=Call(3, 1))
    plain = simulate(x, compressor, topology, Call(3, 1))

    assert same_bits(ended.result, plain.result)
    assert ended.bytes_sent == plain.bytes_sent
    assert sum(seen.messages for seen in log.hops.values()) == 5 * 5


@pytest.mark.parametrize("compressor", [Uncompressed("bf16"), DynamiQCompressor.paper()])
def test_every_entry_is_in_one_chunk(compressor):
    _, log = observe(sample(4, 3000), compressor, Ring())
    places = torch.cat([log.places[chunk] for chunk in range(4)])
    assert torch.equal(places.sort().values, torch.arange(3000))


def test_each_hop_of_a_ring_by_hand():
    """Chunk c starts at rank c + 1 and is summed rank by rank up to its owner c."""
    n, count = 4, 250
    x = sample(n, n * count)
    _, log = observe(x, Uncompressed("bf16"), Ring())
    expected = [0.0] * n
    for c in range(n):
        part = slice(c * count, (c + 1) * count)
        partial = torch.zeros(count)
        for hop in range(n):
            partial = partial + x[(c + 1 + hop) % n, part]
            arrived = partial.bfloat16().float()
            expected[hop] += (arrived - partial).double().square().sum().item()
            partial = arrived

    assert [log.hops[h].squared_error for h in range(n)] == pytest.approx(expected, rel=1e-12)
    assert {(s.messages, s.entries, s.payload_bytes) for s in log.hops.values()} == {
        (n, n * count, n * count * 2)
    }


@every_topology
def test_what_hops_add_adds_up(gradients, topology):
    """Unbiased rounding: the squared errors of all messages are that of the sum."""
    x = gradients[:, :40_000]
    compressor = DynamiQCompressor.paper(rounding="stochastic")
    total = []
    for seed in range(3):
        ended, log = observe(x, compressor, topology, call=Call(seed))
        exact = x.double().sum(0)
        error = (ended.result.double() - exact).square().sum().item()
        total.append(sum(seen.squared_error for seen in log.hops.values()) / error)
    assert sum(total) / 3 == pytest.approx(1.0, abs=0.05)


def test_few_chunks_stand_for_all():
    x = sample(6, 6 * 512)
    compressor = DynamiQCompressor.paper(rounding="stochastic")
    _, some = observe(x, compressor, Ring(), chunks=range(2))
    _, every = observe(x, compressor, Ring())

    assert sorted(some.places) == [0, 1]
    assert {seen.messages for seen in some.hops.values()} == {2}
    for chunk, places in some.places.items():
        assert torch.equal(places, every.places[chunk])
    report = measure_error(x, compressor, Ring())
    payload = 8 * every.hops[0].payload_bytes / every.hops[0].entries
    assert payload + 32 / 256 == pytest.approx(report.bits_per_entry, rel=1e-12)


def test_messages_of_exact_sums_lose_nothing():
    """What they hold cannot be told apart by entries, so only bytes are noted."""
    x = torch.randn(4, 40_960, generator=torch.Generator().manual_seed(0))
    log = Log(range(4))
    plain, ring = THCCompressor.uniform(), Ring()
    result = measure_error(x, Observed.by(plain, log), ring).result
    assert torch.equal(result, measure_error(x, plain, ring).result)
    bits = [8 * seen.payload_bytes / seen.entries for _, seen in sorted(log.hops.items())]
    assert bits == [4, 5, 6, 6]
    assert not any(seen.squared_error for seen in log.hops.values())
