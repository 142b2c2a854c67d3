"""Nodes of several ranks: the guarantees of one level, and what travels between nodes."""

from collections import Counter
from itertools import pairwise, product

import pytest
import torch

from dynamiq import (
    Butterfly,
    ConfigurationError,
    Direct,
    DynamiQCompressor,
    ErrorFeedback,
    Hierarchical,
    MXCompressor,
    NonFiniteError,
    OmniReduceCompressor,
    Ring,
    THCCompressor,
    Uncompressed,
    measure_error,
    topology_registry,
    vnmse,
)
from dynamiq.core.collective import Collective, Post
from dynamiq.core.compressor import State
from dynamiq.core.drivers import Meter, lockstep
from dynamiq.core.hierarchy import on_levels
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call
from dynamiq.core.metrics import simulate
from dynamiq.core.statistics import StatisticsEncoding
from tests.contracts import compressor as contract
from tests.contracts import topology as laws
from tests.contracts.compressor import same_bits, sample, uneven_bounds
from tests.integrations.worlds import integers, rank_of, run_world, same

WORLDS = [(nodes, g) for nodes in (1, 2, 3) for g in (1, 2, 3)] + [(2, 4), (5, 2)]
PAPER = DynamiQCompressor.paper()

every_world = pytest.mark.parametrize(("nodes", "g"), WORLDS)


def soak(*values):
    """Return parameters of a test that others like it stand for in the default run."""
    return pytest.param(*values, marks=pytest.mark.soak)


def all_reduce(x, op="sum", **options):
    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        pipeline.all_reduce(mine, op, key="x")
        return mine

    return run_world(run, len(x), **options)


@every_world
def test_sums_of_integers_are_exact(nodes, g):
    """Of any number of entries, fewer than ranks and none among them."""
    inputs = [integers(nodes * g, numel) for numel in (37, 0, 1, nodes * g - 1)]

    def run(pipeline):
        mine = [x[rank_of(pipeline)].clone() for x in inputs]
        for tensor in mine:
            pipeline.all_reduce(tensor, "sum")
        return mine

    results = run_world(run, nodes * g, topology=Hierarchical(ranks_per_node=g))
    for x, *outs in zip(inputs, *results, strict=True):
        assert same(outs, x.sum(0))


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


LEARNING = (
    THCCompressor.uniform(8, clamp=4.0, error_feedback=True),
    OmniReduceCompressor(mode="topk", bit_budget=5),
    ErrorFeedback(MXCompressor("mxfp6_e2m3")),
)


@pytest.mark.parametrize("rendezvous", [False, soak(True)], ids=["eager", "rendezvous"])
@pytest.mark.parametrize(
    "compressor",
    [
        THCCompressor.table(),
        OmniReduceCompressor(payload="fp32"),
        MXCompressor("mxfp6_e2m3", scale_rule="ceil", scale_scope="shared"),
        *LEARNING,
    ],
    ids=lambda c: c.kind,
)
def test_every_format_runs_as_it_is_simulated(compressor, rendezvous):
    """With what it learns from call to call, which belongs to a column."""
    topology = Hierarchical(ranks_per_node=2, intra=Direct(), inter=Butterfly())
    inputs = [sample(6, 20_000, seed=seed) for seed in range(3)]

    def run(pipeline):
        mine = [x[rank_of(pipeline)].clone() for x in inputs]
        for tensor in mine:
            pipeline.all_reduce(tensor, key="x")
        return mine

    options = {"compressor": compressor, "topology": topology, "rendezvous": rendezvous}
    results, states = run_world(run, 6, **options), None
    for number, (x, *outs) in enumerate(zip(inputs, *results, strict=True)):
        call = Call(0, number, 6)
        simulated = simulate(x, compressor, topology, call, states)
        assert same(outs, simulated.result)
        assert vnmse(outs[0], x.double().mean(0)) < 0.5
        states = simulated.states
    forgetful = simulate(inputs[-1], compressor, topology, call).result
    assert same_bits(forgetful, outs[0]) is (compressor not in LEARNING)


@pytest.mark.parametrize(
    "local",
    [
        Uncompressed("bf16"),
        MXCompressor(),
        THCCompressor.uniform(8, clamp=5.0),
        OmniReduceCompressor(),
        PAPER,
    ],
    ids=lambda c: c.kind,
)
@pytest.mark.parametrize(("nodes", "g"), [(1, 3), (3, 2)])
def test_formats_inside_a_node(nodes, g, local):
    topology = Hierarchical(ranks_per_node=g, intra=Butterfly(), local=local)
    x = sample(nodes * g, 3000)
    results = all_reduce(x, "sum", topology=topology)
    assert same(results, measure_error(x, Uncompressed(), topology).result)
    assert 1e-7 < vnmse(results[0], x.double().sum(0)) < 0.02, "not what was asked for"
    x[g - 1, 7] = torch.nan
    results = all_reduce(x, "sum", topology=topology)
    assert same(results, results[0])
    assert results[0][7].isnan()


def test_calls_that_travel_uncompressed_do_so_inside_nodes():
    """Also if it is only there that anything is compressed."""
    topology = Hierarchical(ranks_per_node=2, local=PAPER)

    def run(pipeline):
        small, large = (torch.full((numel,), 1 / 3) for numel in (999, 1000))
        double = torch.full((5000,), 1 / 3, dtype=torch.float64)
        for tensor in (small, large, double):
            pipeline.all_reduce(tensor, "sum")
        assert same_bits(small, torch.full((999,), 1 / 3) * 4)
        assert not (large == small[0]).all()
        assert same_bits(double, torch.full((5000,), 1 / 3, dtype=torch.float64) * 4)
        return pipeline.metrics()

    for metrics in run_world(run, 4, topology=topology, min_numel=1000):
        assert metrics.skips == {"small": 1, "float64": 1}
        assert metrics.compressed_calls == 1


@pytest.mark.parametrize(
    ("intra", "inter"),
    [
        *((Ring(), Butterfly()), (Butterfly(), Ring()), (Direct(), Direct())),
        *(soak(*both) for both in product((Ring(), Butterfly(), Direct()), repeat=2)),
    ],
    ids=lambda t: t.kind,
)
def test_where_sends_block_until_they_are_received(intra, inter):
    """As NCCL's may: whatever the schedules and the options, one call after another or not."""
    topology = Hierarchical(ranks_per_node=3, intra=intra, inter=inter)
    x = sample(9, 3000)
    bounds = uneven_bounds(3000, 9)

    def run(pipeline):
        tensors = [x[rank_of(pipeline)].clone() for _ in range(3)]
        pipeline.all_reduce(tensors[0], "sum")
        out = torch.empty(bounds[rank_of(pipeline) + 1] - bounds[rank_of(pipeline)])
        handles = [pipeline.all_reduce(tensor, "sum", async_op=True) for tensor in tensors[1:]]
        handles.append(
            pipeline.reduce_scatter(out, x[rank_of(pipeline)], "sum", bounds=bounds, async_op=True)
        )
        for handle in handles:
            handle.wait()
        return [*tensors, out]

    options = {"segments": 3, "verify_every": 2, "on_nonfinite": "raise", "rendezvous": True}
    results = run_world(run, 9, compressor=PAPER, topology=topology, **options)
    *reduced, slices = zip(*results, strict=True)
    for outs in reduced:
        assert same(outs, outs[0])
        assert vnmse(outs[0], x.double().sum(0)) < 0.05
    assert vnmse(torch.cat(slices), x.double().sum(0)) < 0.05
    assert same_bits(reduced[0][0], simulate(x, PAPER, topology, Call()).result)


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


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
@pytest.mark.parametrize("compressor", [Uncompressed(), PAPER], ids=lambda c: c.kind)
def test_narrow_and_wide_tensors(compressor, dtype):
    """What is reduced are the values of the entries; the result is rounded to the dtype once."""
    x = (100 * sample(6, 3001)).to(dtype)
    topology = Hierarchical(ranks_per_node=2)
    options = {"compressor": compressor, "topology": topology, "compress_float64": True}
    results = all_reduce(x, "mean", **options)
    if dtype is torch.float64:
        assert same(results, results[0])
        assert results[0].dtype is dtype
        assert vnmse(results[0], x.mean(0)) < 0.05
    else:
        wide = simulate(x.float(), compressor, topology, Call(0, 0, 6)).result
        assert same(results, wide.to(dtype))


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


def scattered(x, bounds, op="sum", **options):
    """Return every rank's slice of the reduced rows of x[n, d]."""

    def run(pipeline):
        r = rank_of(pipeline)
        out = torch.empty(bounds[r + 1] - bounds[r], dtype=x.dtype)
        before = x[r].clone()
        pipeline.reduce_scatter(out, x[r], op, bounds=bounds, key="x")
        assert same_bits(x[r], before), "the input was written"
        return out

    return run_world(run, len(x), **options)


def cuts(n):
    """Return ways to cut entries into slices: with empty ones, with fewer entries than ranks."""
    return [
        tuple(range(0, 40 * n + 1, 40)),
        uneven_bounds(41 * n, n),
        (*[0] * n, 300),
        (0, *[300] * n),
        (*range(n), n - 1),
        (0,) * (n + 1),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("nodes", "g"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_reduce_scatter_gives_each_rank_its_slice(nodes, g, dtype):
    topology = Hierarchical(ranks_per_node=g, intra=Direct())
    for bounds in cuts(nodes * g):
        x = (integers(nodes * g, bounds[-1]) % 16).to(dtype)
        slices = scattered(x, bounds, topology=topology)
        assert same_bits(torch.cat(slices), x.sum(0))


@pytest.mark.parametrize(
    "compressor",
    [PAPER, THCCompressor.table(), OmniReduceCompressor(), MXCompressor(), ErrorFeedback(PAPER)],
    ids=lambda c: c.kind,
)
@pytest.mark.parametrize(("nodes", "g"), [(3, 2), (2, 3)])
def test_reduce_scatter_of_compressed_slices(nodes, g, compressor):
    """As simulated, of a sum and of a mean, and as good as an all-reduce."""
    topology, n = Hierarchical(ranks_per_node=g, inter=Butterfly()), nodes * g
    for bounds, (op, divisor) in zip(cuts(n), [("sum", 1), ("mean", n)] * 3, strict=True):
        x = sample(n, bounds[-1])
        slices = scattered(x, bounds, op, compressor=compressor, topology=topology)
        call = Call(0, 0, divisor)
        simulated = contract.reduce_scatter(compressor, topology, x, bounds, call=call).outs
        assert all(map(same_bits, slices, simulated))
        if bounds[-1] > 100:
            assert vnmse(torch.cat(slices), x.double().sum(0) / divisor) < 0.1


def test_the_mean_of_a_reduce_scatter():
    x = integers(6, 60)
    slices = scattered(x, uneven_bounds(60, 6), "mean", topology=Hierarchical(ranks_per_node=2))
    assert ((torch.cat(slices) - x.mean(0)).abs() <= 1e-6 * x.mean(0).abs()).all()


def test_non_finite_entries_of_one_slice_raise_on_all_ranks():
    x, bounds = sample(6, 6000), tuple(range(0, 6001, 1000))
    x[1, 4500] = torch.nan
    options = {"compressor": PAPER, "topology": Hierarchical(ranks_per_node=3)}
    slices = scattered(x, bounds, **options)
    assert [bool(part.isfinite().all()) for part in slices] == [r != 4 for r in range(6)]
    errors = scattered(x, bounds, on_nonfinite="raise", catch=True, **options)
    assert {type(error) for error in errors} == {NonFiniteError}


# How much is sent, and where.


def payloads(steps, size):
    """Return the bytes of the payloads that steps send, ``size`` giving those of a message."""
    return sum(size(m) for step in steps for m in step.sends)


def said(collective, x):
    """Return the bytes that one rank sends inside its node and between nodes.

    Derived from the schedule's steps and from encodings of one slice's entries, as a reader of
    docs/design/hierarchy.md would: no size comes from the collective that is tested.
    """
    schedule, rank, compressor = collective.schedule, collective.rank, collective.compressor
    places, nodes = schedule.intra.world_size, schedule.inter.world_size
    steps, place = schedule.steps(rank), rank % places
    bounds, gather = collective.bounds, collective.call.gather
    if bounds is None:
        unit = compressor.unit(-(-x.shape[1] // places), nodes)
        offsets = Layout(x.shape[1], places, unit).slice_offsets().tolist()
        sizes, own = [b - a for a, b in pairwise(offsets)], None
    else:
        own = [[bounds[r + 1] - bounds[r] for r in schedule.column(p)] for p in range(places)]
        sizes = [sum(column) for column in own]
        own = tuple(sum(own[place][:node]) for node in range(nodes + 1))
    near = [step for step in steps if step.link == "node" and (step.reduce or gather)]
    far = [step for step in steps if step.link == "network"]
    inside = 16 * len({step.to for step in near})
    inside += payloads([s for s in near if s.reduce], lambda m: 4 * sizes[m.chunk])
    inside += payloads([s for s in near if not s.reduce], lambda m: x.itemsize * sizes[m.chunk])
    outside = 16 * len({s.to for s in far} | {s.source for s in far})
    if nodes == 1 or not sizes[place]:
        return inside, outside
    layout = Layout(sizes[place], nodes, compressor.unit(sizes[place], nodes), own)
    # Sizes do not depend on the data, so any entries will do.
    statistics = compressor.statistics(x[0, : sizes[place]].float(), layout, Call(), State())
    if statistics is not None:
        small = StatisticsEncoding(statistics, nodes, Call())
        every = range(small.positions)
        outside += payloads(far, lambda m: small.payload_bytes(m, every))
        statistics = statistics.values
    encoding = compressor.encode(statistics, layout, schedule.inter, collective.call, State())
    every = range(encoding.positions)
    far = [step for step in far if step.reduce or gather]
    outside += payloads(far, lambda m: encoding.payload_bytes(m, every))
    return inside, outside


@pytest.mark.parametrize(
    "compressor",
    [
        Uncompressed("bf16"),
        PAPER,
        THCCompressor.table(),
        soak(DynamiQCompressor(4)),
        soak(MXCompressor()),
    ],
    ids=["bf16", "paper", "thc", "default", "mx"],
)
@pytest.mark.parametrize(("nodes", "g"), [(1, 3), (3, 1), (3, 2), (2, 3), soak(4, 3)])
def test_bytes_are_those_of_schedule_and_encoding(nodes, g, compressor):
    n = nodes * g
    topology = Hierarchical(ranks_per_node=g, intra=Direct(), inter=Butterfly())
    for numel, gather in product((0, 5, 10_007), (True, False)):
        x = sample(n, numel).bfloat16()
        bounds = None if gather else uneven_bounds(numel, n)
        call, schedule = Call(gather=gather), topology.schedule(n)
        flat = [Collective(compressor, schedule, r, numel, call, bounds=bounds) for r in range(n)]
        outs = [
            torch.empty(numel if gather else bounds[r + 1] - bounds[r]).bfloat16() for r in range(n)
        ]
        meters = [Meter() for _ in range(n)]
        lockstep([on_levels(c).run(x[c.rank], outs[c.rank]) for c in flat], meters)
        for collective, meter in zip(flat, meters, strict=True):
            found = meter.node_bytes_sent, meter.bytes_sent - meter.node_bytes_sent
            assert found == said(collective, x)


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
        assert metrics.calls == metrics.compressed_calls == 4
        verified = [vnmse(t, x.double().mean(0)) for t in (tensors[1], tensors[3])]
        assert metrics.vnmse == pytest.approx(sum(verified) / 2, rel=1e-6)
        assert metrics.predicted_vnmse is None


def verified(compressor, **options):
    x = sample(4, 4096)
    bounds = uneven_bounds(4096, 4)

    def run(pipeline):
        r = rank_of(pipeline)
        mine, out = x[r].clone(), torch.empty(bounds[r + 1] - bounds[r])
        pipeline.all_reduce(mine, "sum", key="x")
        whole = pipeline.metrics()
        pipeline.reduce_scatter(out, x[r], "sum", bounds=bounds, key="y")
        return mine, out, whole, pipeline.metrics()

    return x.double().sum(0), run_world(run, 4, compressor=compressor, verify_every=1, **options)


@pytest.mark.parametrize(
    "compressor", [DynamiQCompressor(4), ErrorFeedback(PAPER)], ids=lambda c: c.kind
)
def test_the_error_that_is_verified_is_the_calls(compressor):
    exact, results = verified(compressor, topology=Hierarchical(ranks_per_node=2))
    bounds = uneven_bounds(4096, 4)
    for rank, (mine, out, whole, both) in enumerate(results):
        part = exact[bounds[rank] : bounds[rank + 1]]
        assert whole.vnmse == pytest.approx(vnmse(mine, exact), rel=1e-6)
        error = (mine - exact).square().sum() + (out - part).square().sum()
        norm = exact.square().sum() + part.square().sum()
        assert both.vnmse == pytest.approx((error / norm).item(), rel=1e-6)
        assert both.verified_calls == 2
        assert both.predicted_vnmse is None
        assert both.verification_bytes_sent > 2 * 8 * 2048


def test_one_rank_per_node_predicts_what_one_level_does():
    _, flat = verified(DynamiQCompressor(4), topology=Ring())
    _, nodes = verified(DynamiQCompressor(4), topology=Hierarchical(ranks_per_node=1))
    for (*_, one), (*_, two) in zip(flat, nodes, strict=True):
        assert two.predicted_vnmse == one.predicted_vnmse > 0
        assert two.vnmse == one.vnmse


def test_segments_go_with_the_entries_of_a_column(monkeypatch):
    """On all ranks alike, however the entries are cut into slices."""
    monkeypatch.setattr("dynamiq.core.segments._ENTRIES", 3)
    x, bounds = integers(4, 54), (0, 1, 1, 51, 54)

    def run(pipeline):
        r, posts, post = rank_of(pipeline), Counter(), pipeline.transport.post

        def counted(send, to, *rest):
            posts["node" if to // 2 == r // 2 else "network"] += 1
            return post(send, to, *rest)

        pipeline.transport.post = counted
        mine, out = x[r].clone(), torch.empty(bounds[r + 1] - bounds[r])
        pipeline.all_reduce(mine, "sum")
        once = posts["network"]
        pipeline.reduce_scatter(out, x[r], "sum", bounds=bounds)
        assert same_bits(mine, x.sum(0))
        assert same_bits(out, x.sum(0)[bounds[r] : bounds[r + 1]])
        return once, posts["network"] - once

    topology = Hierarchical(ranks_per_node=2)
    # A column's 27 entries are nine times what needs one segment: a header, three there and back.
    assert run_world(run, 4, topology=topology) == [(1 + 3 * 2, 1 + 3)] * 4
    sizes = [topology.schedule(4).compressed_numel(numel) for numel in (0, 1, 54, 55)]
    assert sizes == [0, 1, 27, 28]


@pytest.mark.soak
def test_two_hundred_calls_need_the_memory_of_the_first():
    """Once every size has been met there are no new buffers."""
    x = sample(4, 8000)

    def run(pipeline):
        made = []
        for number in range(200):
            mine = x[rank_of(pipeline)].clone()
            handle = pipeline.all_reduce(mine, key="x", async_op=number % 2 == 0)
            if handle is not None:
                handle.wait()
            if number in (99, 199):
                made.append(pipeline._session._buffers.made)
        return made

    options = {
        "compressor": ErrorFeedback(MXCompressor()),
        "topology": Hierarchical(ranks_per_node=2),
    }
    for half, whole in run_world(run, 4, **options):
        assert 0 < half <= whole <= half + 4


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


@every_world
def test_peers_and_values(nodes, g):
    topology = Hierarchical(ranks_per_node=g, intra=Direct(), inter=Butterfly())
    laws.peers_are_mutual(topology, nodes * g)
    laws.schedules_are_values(topology, nodes * g)
    schedule = topology.schedule(nodes * g)
    assert schedule.compressed_ranks == nodes
    for rank in range(nodes * g):
        halves = [step.reduce for step in schedule.steps(rank)]
        assert halves == sorted(halves, reverse=True), "the reduce-scatter comes first"


@pytest.mark.parametrize(("nodes", "g"), [(1, 4), (3, 1), (2, 3), (4, 3)])
def test_a_call_does_what_its_steps_say(nodes, g):
    """To whom it posts, in what order, and over which links, once headers were exchanged."""
    n = nodes * g
    schedule = Hierarchical(ranks_per_node=g, intra=Butterfly(), inter=Direct()).schedule(n)
    posted = [[] for _ in range(n)]

    def watched(rank, algorithm):
        answer = None
        try:
            while True:
                request = algorithm.send(answer)
                if isinstance(request, Post) and "header" not in request.label:
                    posted[rank].append((request.to, request.source, request.link))
                answer = yield request
        except StopIteration as end:
            return end.value

    x, out = integers(n, 1000), torch.empty(n, 1000)
    parts = [on_levels(Collective(Uncompressed(), schedule, r, 1000, Call())) for r in range(n)]
    lockstep([watched(c.rank, c.run(x[c.rank], out[c.rank])) for c in parts])
    assert same(list(out), x.sum(0))
    for rank in range(n):
        steps = [(step.to, step.source, step.link) for step in schedule.steps(rank)]
        assert posted[rank] == steps


@pytest.mark.timeout(5)
def test_thousands_of_ranks_are_planned_one_rank_at_a_time():
    steps = Hierarchical(ranks_per_node=8).steps(8192, 4097)
    assert len(steps) == 2 * 7 + 2 * 1023


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_schedule_needs_a_rank(world_size):
    with pytest.raises(ConfigurationError, match=f"at least one rank, got {world_size}"):
        Hierarchical(ranks_per_node=1).schedule(world_size)
