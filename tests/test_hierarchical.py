"""Nodes of several ranks: the guarantees of one level, and what travels between nodes."""

import os
import signal
from collections import Counter

import pytest
import torch

from dynamiq import (
    AgreementError,
    Butterfly,
    ConfigurationError,
    Direct,
    DynamiQCompressor,
    DynamiqError,
    ErrorFeedback,
    GlooTransport,
    Hierarchical,
    MXCompressor,
    NonFiniteError,
    PeerLostError,
    Pipeline,
    Ring,
    TransportError,
    Uncompressed,
    measure_error,
    topology_registry,
    vnmse,
)
from dynamiq.core.collective import Collective
from dynamiq.core.drivers import Meter, lockstep
from dynamiq.core.message import Call
from tests.contracts.compressor import same_bits, sample
from tests.integrations.worlds import integers, rank_of, run_world, same
from tests.processes import run_ranks

WORLDS = [(nodes, g) for nodes in (1, 2, 3) for g in (1, 2, 3)] + [(2, 4), (5, 2)]
PAPER = DynamiQCompressor.paper()

every_world = pytest.mark.parametrize(("nodes", "g"), WORLDS)


def all_reduce(x, op="sum", **options):
    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        pipeline.all_reduce(mine, op, key="x")
        return mine

    return run_world(run, len(x), **options)


@every_world
def test_sums_of_integers_are_exact(nodes, g):
    x = integers(nodes * g, 37)
    assert same(all_reduce(x, topology=Hierarchical(ranks_per_node=g)), x.sum(0))


@pytest.mark.parametrize(
    "compressor", [PAPER, MXCompressor("mxfp8_e4m3"), ErrorFeedback(PAPER)], ids=lambda c: c.kind
)
@every_world
def test_all_ranks_have_the_same_bits(nodes, g, compressor):
    topology = Hierarchical(ranks_per_node=g, intra=Butterfly(), inter=Butterfly())
    sizes = (0, 1, 255, 257, 4097)
    inputs = [sample(nodes * g, size, seed=size) for size in sizes]

    def run(pipeline):
        mine = [x[rank_of(pipeline)].clone() for x in inputs]
        for size, tensor in zip(sizes, mine, strict=True):
            pipeline.all_reduce(tensor, key=str(size))
        return mine

    results = run_world(run, nodes * g, compressor=compressor, topology=topology)
    for x, *outs in zip(inputs, *results, strict=True):
        assert same(outs, outs[0])
        if x.shape[1] > 4096:
            assert vnmse(outs[0], x.double().mean(0)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("nodes", "g"), [(1, 3), (2, 2)])
def test_dtypes_and_ranges(nodes, g, dtype):
    """A mean of the largest values is that value; float64 keeps its bits beyond float32's."""
    largest = torch.finfo(dtype).max
    value = 1 + 2**-40 if dtype is torch.float64 else largest
    x = torch.full((nodes * g, 700), value, dtype=dtype)
    expected = x[0] if dtype is not torch.float64 else x[0] * nodes * g
    op = "sum" if dtype is torch.float64 else "mean"
    assert same(all_reduce(x, op, topology=Hierarchical(ranks_per_node=g)), expected)


def test_sixteen_bit_tensors_lose_nothing_between_the_levels():
    x = torch.tensor([[1.0], [2**-9], [2**-9], [2**-9]]).bfloat16()
    exact = x.float().sum(0).bfloat16()
    assert same(all_reduce(x, topology=Hierarchical(ranks_per_node=2)), exact)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_one_rank_per_node_is_the_topology_between_nodes(op):
    x = sample(5, 3000)
    flat = all_reduce(x, op, compressor=PAPER, topology=Butterfly())
    topology = Hierarchical(ranks_per_node=1, inter=Butterfly())
    assert same(all_reduce(x, op, compressor=PAPER, topology=topology), flat[0])


def test_segments_change_no_bit():
    x = sample(6, 20_000)
    topology = Hierarchical(ranks_per_node=2, local=PAPER)
    one = all_reduce(x, compressor=PAPER, topology=topology, segments=1)
    assert same(all_reduce(x, compressor=PAPER, topology=topology, segments=5), one[0])
    simulated = measure_error(x, PAPER, topology).result
    assert same_bits(simulated, one[0]), "a run is its simulation"


def test_nodes_do_not_share_random_numbers():
    """Or else two nodes of equal entries would sum to exactly twice what one has."""
    x = sample(2, 4096)
    topology = Hierarchical(ranks_per_node=2, local=PAPER)
    one = measure_error(x, Uncompressed(), topology).result
    two = measure_error(torch.cat([x, x]), Uncompressed(), topology).result
    assert not torch.equal(two, 2 * one)


def test_columns_do_not_share_random_numbers():
    """Or else places of equal entries would err alike."""
    half = sample(4, 4096)
    topology = Hierarchical(ranks_per_node=2)
    result = measure_error(torch.cat([half, half], 1), PAPER, topology).result
    assert not torch.equal(result[:4096], result[4096:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize(("nodes", "g"), [(1, 2), (2, 2), (3, 1), (2, 3)])
def test_non_finite_entries_reach_all_ranks_and_raise_on_all(nodes, g, bad):
    x = sample(nodes * g, 5000)
    x[-1, 4999] = bad
    options = {"compressor": PAPER, "topology": Hierarchical(ranks_per_node=g)}
    results = all_reduce(x, **options)
    assert same(results, results[0])
    assert not results[0][4999].isfinite()
    assert results[0][:2000].isfinite().all()
    errors = all_reduce(x, on_nonfinite="raise", catch=True, **options)
    assert {type(error) for error in errors} == {NonFiniteError}


@pytest.mark.parametrize(("nodes", "g"), [(1, 3), (3, 1), (2, 3)])
def test_reduce_scatter(nodes, g):
    n = nodes * g
    x = integers(n, 4 * n)
    bounds = (0, *(4 * r + r % 3 for r in range(1, n)), 4 * n)

    def run(pipeline):
        r = rank_of(pipeline)
        out = torch.empty(bounds[r + 1] - bounds[r])
        pipeline.reduce_scatter(out, x[r], "sum", bounds=bounds)
        return out

    slices = run_world(run, n, topology=Hierarchical(ranks_per_node=g, intra=Direct()))
    assert torch.equal(torch.cat(slices), x.sum(0))


@pytest.mark.parametrize(("nodes", "g"), [(2, 3), (3, 2), (1, 4)])
def test_between_nodes_travels_what_the_collective_between_nodes_sends(nodes, g):
    """Counted at the transport, against the flat topology on one place's slice."""
    n, numel = nodes * g, g * 8192
    x = sample(n, numel)

    def run(pipeline):
        sent, post, own = Counter(), pipeline.transport.post, rank_of(pipeline)

        def counted(send, to, *rest):
            sent[to // g == own // g] += 0 if send is None else send.numel()
            return post(send, to, *rest)

        pipeline.transport.post = counted
        pipeline.all_reduce(x[own].clone())
        metrics = pipeline.metrics()
        assert metrics.node_bytes_sent == sent[True]
        assert metrics.bytes_sent == sent[True] + sent[False]
        return sent[False], metrics.bits_per_entry

    topology = Hierarchical(ranks_per_node=g)
    counts = run_world(run, n, compressor=PAPER, topology=topology)
    for rank, (between, bits) in enumerate(counts):
        meters = [Meter() for _ in range(nodes)]
        schedule, outs = Ring().schedule(nodes), torch.empty(nodes, 8192)
        parts = [Collective(PAPER, schedule, k, 8192, Call()) for k in range(nodes)]
        lockstep([c.run(x[c.rank, :8192], outs[c.rank]) for c in parts], meters)
        assert between == meters[rank // g].bytes_sent
        assert bits == (8 * between / parts[0].volume if nodes > 1 else 0)


def test_asynchronous_calls_and_verification():
    x = sample(4, 4096)

    def run(pipeline):
        tensors = [x[rank_of(pipeline)].clone() for _ in range(4)]
        handles = [pipeline.all_reduce(t, async_op=True) for t in tensors]
        for handle in handles:
            handle.wait()
        pipeline.close()
        return tensors, pipeline.metrics()

    topology = Hierarchical(ranks_per_node=2)
    results = run_world(run, 4, compressor=PAPER, topology=topology, verify_every=2)
    for tensors, metrics in results:
        assert all(map(same_bits, tensors, results[0][0]))
        assert metrics.verified_calls == 2
        verified = [vnmse(t, x.double().mean(0)) for t in (tensors[1], tensors[3])]
        assert metrics.vnmse == pytest.approx(sum(verified) / 2, rel=1e-6)
        assert metrics.predicted_vnmse is None


# What goes wrong.


@pytest.mark.parametrize("odd", [{0}, {3}, {0, 1}, {0, 2, 4}], ids=str)
def test_ranks_in_different_calls_find_out(odd):
    """Ranks next to one that differs say why, others lose a peer; nothing was written."""
    topology = Hierarchical(ranks_per_node=2)

    def run(pipeline):
        mine = torch.ones(8 if rank_of(pipeline) in odd else 9)
        with pytest.raises(DynamiqError) as error:
            pipeline.all_reduce(mine, "sum")
        assert (mine == 1).all()
        return type(error.value), str(error.value)

    errors = run_world(run, 6, topology=topology)
    for rank, (kind, words) in enumerate(errors):
        assert issubclass(kind, (AgreementError, TransportError))
        peers = topology.schedule(6).peers(rank)
        if any((rank in odd) != (peer in odd) for peer in peers):
            assert kind is AgreementError
            assert f"rank {rank} is in #0" in words


def test_a_world_that_is_no_multiple_is_refused_on_every_rank():
    def run(pipeline):
        with pytest.raises(ConfigurationError, match="5 ranks cannot be split into nodes of 2"):
            pipeline.connect()

    run_world(run, 5, topology=Hierarchical(ranks_per_node=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node=0"),
        ({"ranks_per_node": 2, "inter": Hierarchical(ranks_per_node=2)}, "one level"),
        ({"ranks_per_node": 2, "local": ErrorFeedback(PAPER)}, "carries state"),
    ],
)
def test_what_cannot_work_is_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        Hierarchical(**options)


@pytest.mark.parametrize("gone", [1, 2])
def test_a_peer_that_closes(gone):
    def run(pipeline):
        pipeline.all_reduce(torch.ones(100))
        if rank_of(pipeline) == gone:
            pipeline.close()
            return PeerLostError
        with pytest.raises(DynamiqError) as error:
            pipeline.all_reduce(torch.ones(100))
        return type(error.value)

    assert set(run_world(run, 4, topology=Hierarchical(ranks_per_node=2))) == {PeerLostError}


def lose_a_peer(rank):
    pipeline = Pipeline(
        PAPER, Hierarchical(ranks_per_node=2), GlooTransport(timeout_s=30), min_numel=0
    )
    pipeline.all_reduce(torch.ones(1000))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pipeline.all_reduce(torch.ones(1000))
    except DynamiqError as error:
        return type(error)
    return None


@pytest.mark.soak
def test_a_killed_peer():
    results = run_ranks(lose_a_peer, 4, lost={3})
    assert {kind for kind in results if kind is not None} == {PeerLostError}


# What it is as data.


def test_steps_are_those_of_both_levels():
    topology = Hierarchical(ranks_per_node=2)
    steps = topology.steps(6, 3)
    assert [(s.to, s.source, s.link, s.reduce) for s in steps] == [
        (2, 2, "node", True),
        *[(5, 1, "network", True)] * 2,
        *[(5, 1, "network", False)] * 2,
        (2, 2, "node", False),
    ]
    assert topology.hops(6) == Ring().hops(3)


def test_it_is_read_back_from_its_fields():
    topology = Hierarchical(ranks_per_node=4, inter=Butterfly(), local=Uncompressed("bf16"))
    assert topology_registry.read(topology.to_dict()) == topology
