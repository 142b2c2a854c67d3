"""Results of whole pipelines over threads: the right ones, on all ranks the bits of lockstep."""

import pytest
import torch

from dynamiq import (
    Butterfly,
    Direct,
    DynamiQCompressor,
    ErrorFeedback,
    Ring,
    Uncompressed,
    measure_error,
)
from dynamiq.core.segments import segment_count
from tests.contracts import compressor as contract
from tests.contracts.compressor import same_bits, sample, uneven_bounds
from tests.integrations.worlds import integers, lockstep, rank_of, run_world, same
from tests.probes import AdaptiveFixedPoint, FloatPerHop, NonZeroBlocks

TOPOLOGIES = [Ring(), Butterfly(), pytest.param(Direct(), marks=pytest.mark.soak)]
PAPER = DynamiQCompressor.paper()
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.kind)
every_op = pytest.mark.parametrize("op", ["mean", "sum"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def all_reduce(x, op="sum", **options):
    """Return what every rank has after an all-reduce of the rows of x[n, ...]."""

    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        assert pipeline.all_reduce(mine, op) is None
        return mine

    return run_world(run, len(x), **options)


@every_op
@every_topology
@pytest.mark.parametrize("world_size", range(1, 10))
def test_sums_and_means_of_integers_are_exact(world_size, topology, op):
    x = integers(world_size, 37)
    exact = x.sum(0) / (world_size if op == "mean" else 1)
    assert same(all_reduce(x, op, topology=topology), exact)


@every_op
@every_topology
@pytest.mark.parametrize("world_size", range(1, 10))
def test_a_run_is_its_simulation(world_size, topology, op):
    x = sample(world_size, 900)
    expected = lockstep(x, PAPER, topology, op)
    assert same(all_reduce(x, op, compressor=PAPER, topology=topology), expected)


@every_topology
@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize(
    "compressor",
    [
        PAPER,
        DynamiQCompressor.local(9, widths=(1, 4, 16)),
        Uncompressed("bf16"),
        FloatPerHop(),
    ],
    ids=lambda c: c.kind,
)
def test_a_run_is_measured_by_measure_error(compressor, topology, rendezvous):
    x = sample(5, 1937)
    expected = measure_error(x, compressor, topology).result
    results = all_reduce(x, compressor=compressor, topology=topology, rendezvous=rendezvous)
    assert same(results, expected)


SIZES = [0, 1, 2, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097]


@every_topology
@pytest.mark.parametrize("world_size", [2, 5])
@pytest.mark.parametrize(
    "compressor",
    [Uncompressed("fp32"), PAPER, NonZeroBlocks()],
    ids=lambda c: c.kind,
)
def test_sizes_around_those_of_units(compressor, world_size, topology):
    """One pipeline, one call after the other; also fewer entries than ranks, and none."""
    tensors = [sample(world_size, size, seed=size) for size in SIZES]

    def run(pipeline):
        mine = [x[rank_of(pipeline)].clone() for x in tensors]
        for tensor in mine:
            pipeline.all_reduce(tensor, "sum")
        return mine

    results = run_world(run, world_size, compressor=compressor, topology=topology)
    for number, (x, *outs) in enumerate(zip(tensors, *results, strict=True)):
        assert same(outs, lockstep(x, compressor, topology, number=number)), SIZES[number]


@every_dtype
@every_op
@pytest.mark.parametrize("compressor", [Uncompressed("fp32"), PAPER], ids=lambda c: c.kind)
def test_dtypes(dtype, op, compressor):
    """float64 travels as it is; narrower floats come back in their own dtype, rounded once."""
    x = sample(3, 1000).to(dtype)
    used = Uncompressed("fp64") if dtype is torch.float64 else compressor
    results = all_reduce(x, op, compressor=compressor)
    assert results[0].dtype is dtype
    assert same(results, lockstep(x, used, Ring(), op))


@every_op
def test_float64_may_be_compressed(op):
    x = sample(3, 1000).double()
    results = all_reduce(x, op, compressor=PAPER, compress_float64=True)
    assert same(results, lockstep(x, PAPER, Ring(), op))


# Strides. Each function makes a view in memory that is otherwise filled with a mark.

MARK = 7.25


def memory(*shape, **options):
    return torch.full(shape, MARK, **options)


VIEWS = {
    "scalar": lambda: memory(3)[1],
    "empty": lambda: memory(0, 5),
    "one of many": lambda: memory(3, 5)[1],
    "slice": lambda: memory(40)[7:31],
    "every third": lambda: memory(120)[1::3],
    "transposed": lambda: memory(8, 20).T,
    "a part of columns": lambda: memory(8, 20)[1:7, 3:17],
    "permuted": lambda: memory(3, 4, 5).permute(2, 0, 1),
    "channels last": lambda: memory(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "diagonal": lambda: memory(9, 9).diagonal(),
    "stride 0 over a size of 1": lambda: memory(6).as_strided((6, 1), (1, 0)),
    "of parameters": lambda: torch.nn.Parameter(memory(4, 6)).detach()[:, ::2],
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides(view):
    """The view holds the result, and what lies beside it in memory is left alone."""
    world_size = 3
    shape = VIEWS[view]().shape
    x = integers(world_size, *shape)

    def run(pipeline):
        mine = VIEWS[view]()
        mine.copy_(x[rank_of(pipeline)])
        pipeline.all_reduce(mine, "sum")
        values = mine.clone()
        mine.fill_(MARK)
        whole = torch.tensor(mine.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32)
        assert (whole == MARK).all()
        return values.contiguous()

    assert same(run_world(run, world_size), x.sum(0).contiguous())


@pytest.mark.parametrize("compressor", [Uncompressed("fp32"), PAPER], ids=lambda c: c.kind)
def test_strides_change_no_bit(compressor):
    x = sample(3, 700)
    plain = all_reduce(x, compressor=compressor)
    strided = all_reduce(torch.stack([x, x], dim=2)[:, :, 0], compressor=compressor)
    grid = all_reduce(x.view(3, 20, 35).transpose(1, 2), compressor=compressor)
    assert same(strided, plain[0])
    ordered = x.view(3, 20, 35).transpose(1, 2).reshape(3, -1)
    assert same([g.reshape(-1) for g in grid], all_reduce(ordered, compressor=compressor)[0])


def test_gradients_of_parameters_in_place():
    """What a training loop without DDP does."""

    def run(pipeline):
        torch.manual_seed(rank_of(pipeline))
        parameter = torch.nn.Parameter(torch.ones(300))
        (parameter * (rank_of(pipeline) + 1)).sum().backward()
        pipeline.all_reduce(parameter.grad)
        return parameter.grad

    assert same(run_world(run, 4), torch.full((300,), 2.5))


def test_a_leaf_may_be_reduced_without_grad_mode():
    def run(pipeline):
        parameter = torch.nn.Parameter(torch.full((5,), float(rank_of(pipeline))))
        with torch.no_grad():
            pipeline.all_reduce(parameter)
        return parameter.detach()

    assert same(run_world(run, 3), torch.ones(5))


# Reduce-scatter.


def reduce_scatter(x, bounds=None, op="sum", **options):
    """Return every rank's slice; checks that the input stays as it is."""
    n, d = x.shape
    offsets = bounds or [d * r // n for r in range(n + 1)]

    def run(pipeline):
        rank = rank_of(pipeline)
        mine, before = x[rank].clone(), x[rank].clone()
        out = torch.full((offsets[rank + 1] - offsets[rank],), torch.nan, dtype=x.dtype)
        assert pipeline.reduce_scatter(out, mine, op, bounds=bounds) is None
        assert same_bits(mine, before)
        return out

    return run_world(run, n, **options)


@every_op
@every_topology
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
def test_reduce_scatter_gives_every_rank_its_slice(world_size, topology, op):
    x = integers(world_size, 12 * world_size)
    exact = x.sum(0) / (world_size if op == "mean" else 1)
    assert same_bits(torch.cat(reduce_scatter(x, op=op, topology=topology)), exact)


@every_op
@every_topology
@pytest.mark.parametrize(
    "bounds", [(0, 0, 100, 100, 300), (0, 300, 300, 300, 300), (0, 1, 2, 3, 300), (0, 0, 0, 0, 0)]
)
def test_slices_may_be_of_any_size(bounds, topology, op):
    x = integers(4, bounds[-1])
    exact = x.sum(0) / (4 if op == "mean" else 1)
    assert same_bits(torch.cat(reduce_scatter(x, bounds, op, topology=topology)), exact)


@every_dtype
@every_topology
def test_a_compressed_reduce_scatter_is_its_simulation(topology, dtype):
    x = sample(4, 2200).to(dtype)
    for bounds in ((0, 550, 1100, 1650, 2200), uneven_bounds(2200, 4)):
        expected = contract.reduce_scatter(PAPER, topology, x, bounds, out_dtype=dtype).outs
        results = reduce_scatter(
            x, bounds, compressor=PAPER, topology=topology, compress_float64=True
        )
        assert all(map(same_bits, results, expected))


@pytest.mark.parametrize(("numel", "world_size"), [(72, 2), (88, 4), (72, 8)])
def test_small_odd_slices(numel, world_size):
    """The sizes with which sharded training calls."""
    x = sample(world_size, numel)
    result = torch.cat(reduce_scatter(x, compressor=PAPER))
    exact = x.double().sum(0)
    assert (result - exact).square().sum() < 0.05 * exact.square().sum()


def test_a_reduce_scatter_may_write_into_its_input():
    x = integers(3, 30)

    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        out = mine[10 * rank_of(pipeline) : 10 * rank_of(pipeline) + 10]
        pipeline.reduce_scatter(out, mine, "sum")
        return out.clone()

    assert same_bits(torch.cat(run_world(run, 3)), x.sum(0))


def test_a_reduce_scatter_reads_any_strides():
    x = integers(3, 30, 2)

    def run(pipeline):
        out = torch.empty(10)
        pipeline.reduce_scatter(out, x[rank_of(pipeline)][:, 1], "sum")
        return out

    assert same_bits(torch.cat(run_world(run, 3)), x[:, :, 1].sum(0))


# The same call, cut, ordered and transported otherwise.


@every_topology
@pytest.mark.parametrize("rendezvous", [False, True])
@pytest.mark.parametrize("segments", [2, 3, 1000])
def test_segments_change_no_bit(segments, rendezvous, topology):
    x = sample(4, 300)
    options = {"compressor": Uncompressed("bf16"), "topology": topology}
    whole = all_reduce(x, **options)
    assert same(all_reduce(x, segments=segments, rendezvous=rendezvous, **options), whole[0])


@pytest.mark.parametrize("segments", [1, 3, None])
def test_segments_travel_as_messages_of_their_own(segments):
    """On a ring of 3, four messages each; the header goes to both neighbours."""

    def run(pipeline):
        sizes = []
        post = pipeline.transport.post

        def counted(send, *rest):
            sizes.append(send.numel())
            return post(send, *rest)

        pipeline.transport.post = counted
        pipeline.all_reduce(torch.ones(27))
        return sizes

    segments = segments or 1
    sent = {36} if segments == 1 else {12}
    for headers, messages in ((s[:2], s[2:]) for s in run_world(run, 3, segments=segments)):
        assert headers == [16, 16]
        assert (len(messages), set(messages)) == (4 * segments, sent)


@every_topology
def test_statistics_travel_in_one_segment(topology):
    x = torch.randn(2, 2 * 520 * 256, generator=torch.Generator().manual_seed(0))

    def statistics_of(segments):
        def run(pipeline):
            labels = []
            post = pipeline.transport.post
            pipeline.transport.post = lambda *what: labels.append(what[5]) or post(*what)
            pipeline.all_reduce(x[rank_of(pipeline)].clone())
            return ["statistics" in label for label in labels]

        options = {"compressor": PAPER, "topology": topology, "segments": segments}
        return run_world(run, 2, **options)[0]

    whole, parts = statistics_of(1), statistics_of(2)
    assert len(parts) > len(whole)
    assert sum(parts) == sum(whole) > 0


def test_large_tensors_have_several_segments(monkeypatch):
    monkeypatch.setattr("dynamiq.core.segments._ENTRIES", 3)
    x = torch.randn(3, 27, generator=torch.Generator().manual_seed(0))

    def run(pipeline):
        posts = []
        post = pipeline.transport.post
        pipeline.transport.post = lambda *what: posts.append(what[5]) or post(*what)
        mine = x[rank_of(pipeline)].clone()
        pipeline.all_reduce(mine)
        return mine, len(posts)

    (whole, few), *_ = run_world(run, 3, segments=1)
    (parts, more), *_ = run_world(run, 3)
    assert same([whole, parts], whole)
    assert (few - 2, more - 2) == (4, 4 * 3), "27 entries are 9 times what needs one"


def test_segments_go_with_the_root_of_the_entries():
    def segments(entries, *, on_cpu=True):
        return segment_count(Ring().schedule(8), entries, on_cpu=on_cpu)

    known = {1: 1, 1 << 19: 1, 1 << 21: 2, 1 << 24: 6, 1 << 26: 8, 1 << 31: 8}
    assert {entries: segments(entries) for entries in known} == known
    assert segments(1 << 24, on_cpu=False) == 1


@every_topology
def test_segments_of_several_tiles_change_no_bit(topology):
    """DynamiQ's segments are ranges of tiles of 512 supergroups."""
    x = torch.randn(2, 2 * 520 * 256 + 1, generator=torch.Generator().manual_seed(0))
    options = {"compressor": PAPER, "topology": topology}
    whole = all_reduce(x, **options)
    assert same(all_reduce(x, segments=2, **options), whole[0])


def test_seed_and_call_number_are_the_randomness():
    x = sample(3, 1000)

    def run(pipeline):
        mine = [x[rank_of(pipeline)].clone() for _ in range(3)]
        for tensor in mine:
            pipeline.all_reduce(tensor, "sum")
        return mine

    first, again, other = (
        run_world(run, 3, compressor=PAPER, seed=seed)[0] for seed in (0, 0, 2**64 - 1)
    )
    assert all(map(same_bits, first, again))
    assert not any(map(same_bits, first, other))
    assert not same_bits(first[0], first[1])
    assert same_bits(first[2], lockstep(x, PAPER, Ring(), number=2))


@pytest.mark.parametrize(
    "compressor", [AdaptiveFixedPoint(), ErrorFeedback(PAPER)], ids=lambda c: c.kind
)
def test_state_is_kept_by_key(compressor):
    """Two tensors by turns give what each gives alone, at the same call numbers."""
    x = {"a": sample(3, 600), "b": 30 * sample(3, 600, seed=1)}
    order = ["a", "b", "a", "a", "b"]

    def run(pipeline):
        results = []
        for name in order:
            mine = x[name][rank_of(pipeline)].clone()
            pipeline.all_reduce(mine, "sum", key=name)
            results.append(mine)
        return results

    results = run_world(run, 3, compressor=compressor)
    states = {"a": None, "b": None}
    for number, (name, *outs) in enumerate(zip(order, *results, strict=True)):
        call = contract.Call(0, number)
        outcome = contract.all_reduce(compressor, Ring(), x[name], call=call, states=states[name])
        states[name] = outcome.states
        assert same(outs, outcome.outs[0])


# The ends of the range.


@every_topology
@pytest.mark.parametrize("compressor", [Uncompressed("fp16"), Uncompressed("fp32"), PAPER], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 6, 9])
def test_a_mean_of_float16_does_not_overflow(world_size, compressor, topology):
    """The sum would, long before 65504."""
    x = torch.full((world_size, 600), 65504.0)
    x[:, ::3] = -65504.0
    x[:, 1::3] = 60000.0 + 1000 * torch.arange(world_size)[:, None] / 2
    x = x.clamp(max=65504.0).half()
    results = all_reduce(x, compressor=compressor, op="mean", topology=topology)
    assert same(results, results[0])
    assert results[0].isfinite().all()
    error = (results[0].double() - x.double().mean(0)).abs().max()
    assert error <= (16_000 if compressor is PAPER else 64)


def test_a_strided_mean_of_float16_does_not_overflow_either():
    """Its result is written to memory of another dtype first."""
    x = (60_000.0 + 5_504 * torch.rand(2, 20_000, 2)).half()
    results = run_world(
        lambda pipeline: pipeline.all_reduce(x[rank_of(pipeline)][:, 0], "mean"),
        2,
        compressor=PAPER,
    )
    assert len(results) == 2
    assert x[0, :, 0].isfinite().all()
    assert same_bits(x[0, :, 0].contiguous(), x[1, :, 0].contiguous())


@every_topology
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compressor", [Uncompressed("fp32"), PAPER], ids=lambda c: c.kind)
def test_a_mean_of_the_largest_numbers_is_finite(compressor, dtype, topology):
    largest = torch.finfo(dtype).max
    x = torch.full((3, 700), largest, dtype=dtype)
    x[:, ::2] *= -1
    (result, *others) = all_reduce(x, "mean", compressor=compressor, topology=topology)
    assert same(others, result)
    assert result.isfinite().all()
    assert ((result.double() / x[0].double()) > 0.95).all()


@pytest.mark.parametrize("compress_float64", [False, True])
def test_a_mean_of_large_float64_is_finite(compress_float64):
    largest = torch.finfo(torch.float32 if compress_float64 else torch.float64).max
    x = torch.full((3, 700), largest, dtype=torch.float64)
    results = all_reduce(x, "mean", compressor=PAPER, compress_float64=compress_float64)
    assert same(results, results[0])
    assert ((results[0] / largest - 1).abs() < 0.01).all()


def test_a_sum_of_large_numbers_that_cancel():
    """Only the result must fit, not the sums on the way."""
    largest = torch.finfo(torch.float32).max
    x = torch.full((4, 600), largest) * torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None]
    x[0] *= 0.5
    (result, *_) = all_reduce(x, "sum", compressor=PAPER)
    assert result.isfinite().all()
    assert ((result.double() + 0.5 * largest).abs() < 0.05 * largest).all()


@pytest.mark.parametrize("compressor", [Uncompressed("fp32"), PAPER], ids=lambda c: c.kind)
@every_op
def test_subnormal_numbers(compressor, op):
    tiny = 2.0**-149
    x = torch.full((4, 600), 64 * tiny)
    x[1] = 0.0
    results = all_reduce(x, op, compressor=compressor)
    exact = 3 * 64 * tiny / (4 if op == "mean" else 1)
    assert same(results, results[0])
    assert ((results[0] - exact).abs() <= 4 * tiny).all()


def test_magnitudes_of_all_orders_in_one_tensor():
    """Large supergroups do not swallow small ones."""
    scale = torch.tensor([2.0**120, 2.0**-140, 1.0, 2.0**60, 2.0**-60])
    x = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0)) * scale[:, None]
    (result, *_) = all_reduce(x, "mean", compressor=DynamiQCompressor.paper(8.0))
    exact = x.double().mean(0)
    error = (result.double() - exact).square().sum(1) / exact.square().sum(1)
    assert (error < 0.1).all()


# Values that are not finite.


def poisoned(x, rank, index, value):
    broken = x.clone()
    broken[rank, index] = value
    return broken


@every_topology
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
@pytest.mark.parametrize("owner", range(4))
def test_a_non_finite_entry_makes_its_supergroup_nan_on_every_rank(owner, value, topology):
    """All other supergroups are, bit for bit, what they are if that one is zero on all ranks.

    It comes last in the order of energies, so that the number of supergroups decides which rank
    owns it.
    """
    numel = 256 * (9 + owner) - 5
    x = sample(4, numel)
    for rank, index in ((0, 0), ((owner + 1) % 4, 1023), (3, numel - 1)):
        supergroup = slice(index // 256 * 256, index // 256 * 256 + 256)
        results = all_reduce(poisoned(x, rank, index, value), compressor=PAPER, topology=topology)
        without = x.clone()
        without[:, supergroup] = 0.0
        expected = lockstep(without, PAPER, topology)
        expected[supergroup] = torch.nan
        for result in results:
            assert torch.equal(result.isnan(), expected.isnan())
            finite = ~expected.isnan()
            assert same_bits(result[finite], expected[finite])


@every_topology
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_an_uncompressed_non_finite_entry_stays_alone(value, topology):
    x = sample(4, 500)
    expected = lockstep(x, Uncompressed(), topology)
    expected[77] = value
    results = all_reduce(poisoned(x, 1, 77, value), topology=topology)
    for result in results:
        assert torch.equal(result.nan_to_num(1e9), expected.nan_to_num(1e9))


@pytest.mark.parametrize("compressor", [Uncompressed("fp32"), PAPER], ids=lambda c: c.kind)
def test_the_next_call_is_not_poisoned(compressor):
    x = sample(3, 900)

    def run(pipeline):
        mine = [poisoned(x, 1, 300, torch.nan)[rank_of(pipeline)], x[rank_of(pipeline)].clone()]
        for tensor in mine:
            pipeline.all_reduce(tensor, "sum")
        return mine[1]

    assert same(run_world(run, 3, compressor=compressor), lockstep(x, compressor, Ring(), number=1))
