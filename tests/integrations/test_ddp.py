"""The DDP hook in real processes: through the whole life of a model, and when something breaks."""

import contextlib
import copy
import inspect
import pickle
import re
import threading
import time
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq import (
    AgreementError,
    Butterfly,
    DynamiQCompressor,
    DynamiqError,
    ErrorFeedback,
    GlooTransport,
    Hierarchical,
    InputError,
    NonFiniteError,
    PeerTimeoutError,
    Pipeline,
    Ring,
    Uncompressed,
)
from tests.contracts.compressor import same_bits
from tests.probes import AdaptiveFixedPoint
from tests.processes import run_ranks

# A model whose gradients are known: the factors with which its parameters are multiplied.

SHAPES = {"a": (40, 30), "b": (1, 7), "c": (2500,), "d": (3, 5, 2), "e": (64, 64), "f": (1,)}


class Known(nn.Module):
    """The sum of parameters times given factors: each factor is its parameter's gradient."""

    def __init__(self, dtypes=(torch.float32,)):
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            values = torch.zeros(shape, dtype=dtypes[i % len(dtypes)])
            setattr(self, name, nn.Parameter(values))

    def forward(self, factors):
        terms = [(getattr(self, name) * factor).sum() for name, factor in factors.items()]
        return sum(term.real.double() for term in terms)


def factors(model, rank, step, names=tuple(SHAPES)):
    """Return small integers in each parameter's dtype, complex ones for complex parameters."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    found = {}
    for name in names:
        p = getattr(model, name)
        parts = torch.randint(-99, 100, (2, *p.shape), generator=generator).double()
        found[name] = (torch.complex(*parts) if p.is_complex() else parts[0]).to(p.dtype)
    return found


def means(model, world_size, step, names=tuple(SHAPES)):
    """Return what the gradients must be: sum / n over the ranks, rounded once."""
    total = dict.fromkeys(names, 0.0)
    for rank in range(world_size):
        for name, factor in factors(model, rank, step, names).items():
            # The gradient of the real part of p · f is conj(f).
            total[name] = total[name] + factor.conj().resolve_conj()
    return {name: value / world_size for name, value in total.items()}


def pipeline(compressor=None, topology=None, group=None, timeout_s=30.0, **options):
    parts = compressor or Uncompressed("fp32"), topology or Ring()
    return Pipeline(
        *parts, GlooTransport(group, timeout_s=timeout_s), **{"min_numel": 0, **options}
    )


def hooked(model, used, *, group=None, state=None, **options):
    ddp = DistributedDataParallel(model, process_group=group, **{"bucket_cap_mb": 0.01, **options})
    ddp.register_comm_hook(state, used.ddp_hook)
    return ddp


def assert_gradients(model, expected):
    for name, gradient in expected.items():
        actual = getattr(model, name).grad
        assert actual.dtype is getattr(model, name).dtype
        assert torch.equal(
            actual.to(gradient.dtype), gradient.to(actual.dtype).to(gradient.dtype)
        ), name


def backward(ddp, model, rank, step, names=tuple(SHAPES)):
    ddp.zero_grad()
    ddp(factors(model, rank, step, names)).backward()


# Exact means, over the life of a model.


def train(rank, world_size, dtypes, options, pipeline_options):
    """Five steps, with the rebuild of the buckets after the first or second."""
    model = Known(dtypes)
    with pipeline(**pipeline_options) as used:
        ddp = hooked(model, used, **options)
        for step in range(5):
            backward(ddp, model, rank, step)
            assert_gradients(model, means(model, world_size, step))
        return used.metrics()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_gradients_are_exact_means(world_size, options):
    metrics = run_ranks(train, world_size, world_size, (torch.float32,), options, {})
    assert len({m.calls for m in metrics}) == 1
    assert metrics[0].calls > 5, "several buckets, once they have been rebuilt"
    assert metrics[0].skips == {}


@pytest.mark.parametrize(
    "pipeline_options",
    [{"topology": Butterfly()}, {"segments": 4}, {"on_nonfinite": "raise"}, {"verify_every": 2}],
    ids=str,
)
def test_gradients_are_exact_means_with_every_option(pipeline_options):
    (metrics, *_) = run_ranks(train, 3, 3, (torch.float32,), {}, pipeline_options)
    assert metrics.vnmse is None or metrics.vnmse < 1e-14


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float64,),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64, torch.float16),
        (torch.complex64, torch.float32),
    ],
    ids=str,
)
def test_dtypes_of_parameters(dtypes):
    """Mixed dtypes come in separate buckets; a complex one as real numbers."""
    (metrics, _) = run_ranks(train, 2, 2, dtypes, {}, {})
    assert ("complex" in metrics.skips) == (torch.complex64 in dtypes)


def test_warm_up_travels_uncompressed_even_if_the_dtype_is_complex():
    options = {"compressor": DynamiQCompressor.paper(), "start_step": 5}
    (metrics, _) = run_ranks(train, 2, 2, (torch.complex64, torch.float32), {}, options)
    assert set(metrics.skips) == {"complex", "warm-up"}
    assert metrics.compressed_calls == 0


def plain_beside_hooked(rank, world_size, dtype):
    """Train the same model with DDP's own all-reduce and with the hook; return both."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 5)).to(dtype)
    second = copy.deepcopy(first)
    with pipeline() as used:
        models = [
            DistributedDataParallel(first, bucket_cap_mb=0.002),
            hooked(second, used, bucket_cap_mb=0.002),
        ]
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]
        gradients = []
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            x = torch.randn(8, 20, generator=generator).to(dtype)
            for ddp, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                ddp(x).square().sum().backward()
                gradients.append(torch.cat([p.grad.flatten() for p in ddp.parameters()]))
                optimizer.step()
    return gradients


@pytest.mark.parametrize(("world_size", "tolerance"), [(2, 0.0), (3, 3e-6), (4, 3e-6)])
def test_gradients_are_those_of_plain_ddp(world_size, tolerance):
    """Bit for bit where order and division cannot matter, else within FP32's rounding."""
    for gradients in run_ranks(plain_beside_hooked, world_size, world_size, torch.float32):
        for plain, ours in zip(gradients[::2], gradients[1::2], strict=True):
            torch.testing.assert_close(
                ours, plain, rtol=tolerance, atol=tolerance * plain.abs().max().item()
            )


def test_a_bfloat16_model():
    for gradients in run_ranks(plain_beside_hooked, 2, 2, torch.bfloat16):
        for plain, ours in zip(gradients[::2], gradients[1::2], strict=True):
            assert ours.dtype is torch.bfloat16
            torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2 * plain.abs().max().item())


def with_plain_ddp(rank, world_size):
    """Integers and n a power of two: DDP's division before the sum changes nothing."""
    model, other = Known(), Known()
    with pipeline() as used:
        models = hooked(model, used), DistributedDataParallel(other)
        for step in range(3):
            for ddp, inner in zip(models, (model, other), strict=True):
                backward(ddp, inner, rank, step)
            assert all(
                same_bits(a.grad, b.grad)
                for a, b in zip(model.parameters(), other.parameters(), strict=True)
            )


@pytest.mark.parametrize("world_size", [2, 4])
def test_integers_are_as_in_plain_ddp(world_size):
    run_ranks(with_plain_ddp, world_size, world_size)


def use_some(rank, world_size):
    """Parameters are used by all, by one rank, or by none, and that changes from step to step."""
    model = Known()
    with pipeline() as used:
        ddp = hooked(model, used, find_unused_parameters=True)
        for step in range(5):
            of_all, of_one = ("a", "c", "f"), ("abdef"[step],)
            names = (*of_all, *of_one) if rank == 0 else of_all
            backward(ddp, model, rank, step, tuple(dict.fromkeys(names)))
            expected = means(model, world_size, step, of_all)
            for name in set(of_one) - set(of_all):
                mine = factors(model, 0, step, tuple(dict.fromkeys((*of_all, *of_one))))
                expected[name] = mine[name] / world_size
            if not set(of_one) & set(of_all):
                assert_gradients(model, {n: expected[n] for n in of_one})
            for name in set(SHAPES) - set(of_all) - set(of_one):
                gradient = getattr(model, name).grad
                assert gradient is None or not gradient.any()


def test_unused_parameters():
    run_ranks(use_some, 3, 3)


def accumulate(rank, world_size):
    """Two micro-steps without synchronisation, one with it."""
    model = Known()
    with pipeline() as used:
        ddp = hooked(model, used)
        backward(ddp, model, rank, 0)
        calls = used.metrics().calls
        for cycle in range(2):
            ddp.zero_grad()
            steps = [10 * cycle + i for i in range(3)]
            with ddp.no_sync():
                for step in steps[:2]:
                    ddp(factors(model, rank, step)).backward()
            assert used.metrics().calls == calls, "no_sync sends nothing"
            ddp(factors(model, rank, steps[2])).backward()
            assert used.metrics().calls > calls
            calls = used.metrics().calls
            total = [means(model, world_size, step) for step in steps]
            for name in SHAPES:
                # Whole sums are exact, quotients need not be.
                exact = sum(t[name] * world_size for t in total).round() / world_size
                torch.testing.assert_close(getattr(model, name).grad, exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradient_accumulation(world_size):
    run_ranks(accumulate, world_size, world_size)


def join_unevenly(rank, world_size):
    """Rank r has 3 + r batches; ranks that have finished send zeros."""
    model = Known()
    with pipeline() as used:
        ddp = hooked(model, used)
        with ddp.join():
            for step in range(3 + rank):
                backward(ddp, model, rank, step)
                there = [r for r in range(world_size) if step < 3 + r]
                expected = {}
                for name in SHAPES:
                    total = sum(factors(model, r, step)[name] for r in there)
                    expected[name] = total / world_size
                assert_gradients(model, expected)
        return used.metrics().calls


def test_uneven_inputs():
    assert len(set(run_ranks(join_unevenly, 3, 3))) == 1


def freeze(rank, world_size):
    """Freeze a parameter and thaw it again, under the same wrapper and under a new one."""
    model = Known()
    with pipeline() as used:
        ddp = hooked(model, used, find_unused_parameters=True)
        for step in range(6):
            model.c.requires_grad_(step not in (2, 3))
            backward(ddp, model, rank, step)
            expected = means(model, world_size, step)
            if step in (2, 3):
                assert model.c.grad is None
                del expected["c"]
            assert_gradients(model, expected)
        for frozen in (True, False):
            model.a.requires_grad_(not frozen)
            ddp = hooked(model, used)
            for step in range(3):
                backward(ddp, model, rank, step)
                expected = means(model, world_size, step)
                if frozen:
                    del expected["a"]
                assert_gradients(model, expected)


def test_a_frozen_parameter():
    run_ranks(freeze, 2, 2)


def one_after_another(rank, world_size):
    """Models and pipelines come and go."""
    threads = threading.active_count()
    for number in range(4):
        model = Known()
        with pipeline() as used:
            ddp = hooked(model, used)
            for step in range(2):
                backward(ddp, model, rank, step + number)
                assert_gradients(model, means(model, world_size, step + number))
        del ddp
    deadline = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    return threading.active_count() - threads


def test_models_one_after_another():
    assert run_ranks(one_after_another, 2, 2) == [0, 0]


def two_at_once(rank, world_size):
    """Two models by turns on one pipeline, told apart by the hook's state."""
    models = {"generator": Known(), "critic": Known()}
    with pipeline(DynamiQCompressor.paper(), start_step=2) as used:
        wrapped = {name: hooked(model, used, state=name) for name, model in models.items()}
        for step in range(2):
            for name, model in models.items():
                backward(wrapped[name], model, rank, step)
                assert_gradients(model, means(model, world_size, step))
        assert used.metrics().compressed_calls == 0, "each has a warm-up of its own"
        for name, model in models.items():
            backward(wrapped[name], model, rank, 2)
        return used.metrics()


def test_two_models_on_one_pipeline():
    (metrics, _) = run_ranks(two_at_once, 2, 2)
    assert metrics.compressed_calls > 0
    assert set(metrics.skips) == {"warm-up"}


def in_a_subgroup(rank):
    """Ranks 1 and 3 of 4 train a model; the mean is over two."""
    members = dist.new_group([1, 3])
    if rank in (0, 2):
        return None
    model = Known()
    with pipeline(group=members) as used:
        ddp = hooked(model, used, group=members)
        for step in range(3):
            backward(ddp, model, rank // 2, step)
            assert_gradients(model, means(model, 2, step))
        return used.rank


def test_a_subgroup():
    assert run_ranks(in_a_subgroup, 4) == [None, 0, None, 1]


def in_flight(rank):
    """Rank 1 comes late, so all of rank 0's buckets are on their way at once."""
    model = Known()
    with pipeline() as used:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
        unfinished = []

        def hook(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            future = used.ddp_hook(state, bucket)
            unfinished.append(future)
            if bucket.is_last():
                counts.append(sum(not f.done() for f in unfinished))
            return future

        counts = []
        ddp.register_comm_hook(None, hook)
        used.connect()
        for step in range(3):
            dist.barrier()
            unfinished.clear()
            time.sleep(0.3 * rank)
            backward(ddp, model, rank, step)
            assert_gradients(model, means(model, 2, step))
        return counts


def test_buckets_are_in_flight_together():
    early, _ = run_ranks(in_flight, 2)
    assert min(early[1:]) >= 2, "there is one bucket before they are rebuilt"


class Embedded(nn.Module):
    """A sparse table and a dense head."""

    def __init__(self, rows=50, dtype=torch.float32):
        super().__init__()
        self.table = nn.Embedding(rows, 6, sparse=True, dtype=dtype)
        self.head = nn.Linear(6, 3, dtype=dtype)

    def forward(self, rows):
        return self.head(self.table(rows))


def embed(rank, world_size, dtype, options):
    """Ranks look up different rows, some the same, some twice."""
    torch.manual_seed(0)
    model = Embedded(dtype=dtype)
    with pipeline(**options) as used:
        ddp = hooked(model, used)
        for step in range(3):
            rows_of = [[3 * r, 3 * r + step, 7, 7] for r in range(world_size)]
            ddp.zero_grad()
            ddp(torch.tensor(rows_of[rank])).sum().backward()
            gradient = model.table.weight.grad
            assert gradient.is_sparse
            assert gradient.is_coalesced()
            assert gradient.dtype is dtype
            row = model.head.weight.detach().sum(0).float()
            expected = torch.zeros(50, 6)
            for r in range(world_size):
                for i in rows_of[r]:
                    expected[i] += row
            expected = expected / world_size
            tolerance = 1e-6 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(
                gradient.to_dense().float(), expected, rtol=tolerance, atol=tolerance
            )
            union = sorted({i for rows in rows_of for i in rows})
            assert gradient.indices()[0].tolist() == union
        return used.metrics().skips, gradient.to_dense()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"compressor": DynamiQCompressor.paper(), "start_step": 0}],
    ids=["plain", "paper"],
)
def test_sparse_gradients_stay_sparse(dtype, options):
    results = run_ranks(embed, 3, 3, dtype, options)
    assert all(skips["sparse"] == 6 for skips, _ in results)
    assert all(same_bits(table, results[0][1]) for _, table in results)


def scale(rank, world_size, compressor):
    """Rank 1 meets an infinity in step 3: all ranks skip that step, and only that one."""
    model = Known()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    with pipeline(compressor, start_step=1) as used:
        ddp = hooked(model, used)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        history = []
        for step in range(5):
            given = factors(model, rank, step)
            if step == 3 and rank == 1:
                given["c"][77] = torch.inf
            optimizer.zero_grad()
            scaler.scale(ddp(given)).backward()
            before = model.c.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            history.append((torch.equal(model.c, before), scaler.get_scale()))
        return history, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "compressor", [Uncompressed("fp32"), DynamiQCompressor.paper()], ids=lambda c: c.kind
)
def test_all_ranks_skip_the_same_step(compressor):
    results = run_ranks(scale, 3, 3, compressor)
    for history, parameters in results:
        assert history == [(False, 4.0)] * 3 + [(True, 2.0), (False, 2.0)]
        assert same_bits(parameters, results[0][1])
        assert parameters.isfinite().all()


# Nodes of several ranks.


@pytest.mark.parametrize(
    ("dtypes", "pipeline_options"),
    [
        ((torch.float32,), {"verify_every": 2, "on_nonfinite": "raise", "segments": 2}),
        pytest.param((torch.float64, torch.float32, torch.float16), {}, marks=pytest.mark.soak),
    ],
    ids=["every-option", "dtypes"],
)
def test_gradients_of_two_nodes_are_exact_means(dtypes, pipeline_options):
    options = {"topology": Hierarchical(ranks_per_node=2), **pipeline_options}
    metrics = run_ranks(train, 4, 4, dtypes, {"static_graph": True}, options)
    assert len({m.calls for m in metrics}) == 1
    assert metrics[0].calls > 5
    assert 0 < metrics[0].node_bytes_sent < metrics[0].bytes_sent


def learn_on_nodes(rank, topology, steps):
    """Train with compression on several nodes; return what :func:`learn` does."""
    return learn(rank, ErrorFeedback(DynamiQCompressor.paper(6)), topology, steps)


def test_ranks_of_two_nodes_stay_equal_bit_for_bit():
    """With what each column carries on from step to step, through the rebuild of buckets."""
    topology = Hierarchical(ranks_per_node=2, inter=Butterfly())
    results = run_ranks(learn_on_nodes, 4, topology, 6)
    for losses, parameters, metrics in results:
        assert same_bits(parameters, results[0][1])
        assert losses[-1] < losses[0]
        assert metrics.compressed_calls > Counter(metrics.skips)["warm-up"]


@pytest.mark.parametrize("compressor", [DynamiQCompressor.paper()], ids=lambda c: c.kind)
def test_a_nan_on_one_node_raises_from_backward_on_all(compressor):
    topology = Hierarchical(ranks_per_node=2)
    for kind, text, _ in run_ranks(meet_a_nan, 4, compressor, {}, 3, topology):
        assert kind is NonFiniteError, text
        assert "of step 3" in text


# Training with compression.


def learn(rank, compressor, topology, steps):
    """Fit a small network to a function; return losses, parameters and metrics."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )
    target = torch.randn(16, 4)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    with pipeline(compressor, topology) as used:
        ddp = hooked(model, used, bucket_cap_mb=0.01)
        optimizer = torch.optim.Adam(ddp.parameters(), lr=3e-3)
        for _ in range(steps):
            x = torch.randn(64, 16, generator=generator)
            loss = (ddp(x) - (x @ target).tanh()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, torch.cat([p.detach().flatten() for p in model.parameters()]), used.metrics()


@pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_stay_equal_bit_for_bit(world_size, topology):
    """After the warm-up, with the bits counted that crossed the links."""
    results = run_ranks(learn, world_size, DynamiQCompressor.paper(), topology, 5)
    for _, parameters, metrics in results:
        assert same_bits(parameters, results[0][1])
        buckets = Counter(metrics.skips)["warm-up"]
        assert buckets >= 2
        assert metrics.calls == buckets + metrics.compressed_calls
        assert metrics.compressed_calls >= 3 * 2
    mean_bits = sum(m.bits_per_entry for *_, m in results) / world_size
    assert 4.0 < mean_bits < 5.3, "headers of small buckets included"


def test_the_loss_goes_down_as_without_compression():
    plain, compressed = (
        run_ranks(learn, 2, compressor, Ring(), 60)[0][0]
        for compressor in (Uncompressed("fp32"), DynamiQCompressor.paper())
    )
    assert compressed[-1] < 0.6 * compressed[0]
    assert sum(compressed[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.1)


@pytest.mark.parametrize("start_step", [0, 1, 4])
def test_compression_begins_at_start_step(start_step):
    options = {"compressor": DynamiQCompressor.paper(), "start_step": start_step}
    for metrics in run_ranks(count_compressed, 2, options):
        assert metrics == [False] * start_step + [True] * (5 - start_step)


def count_compressed(rank, options):
    model = Known()
    compressed = []
    with pipeline(**options) as used:
        ddp = hooked(model, used)
        for step in range(5):
            before = used.metrics()
            backward(ddp, model, rank, step)
            after = used.metrics()
            new = after.compressed_calls - before.compressed_calls
            assert new in (0, after.calls - before.calls)
            compressed.append(new > 0)
    return compressed


def test_small_buckets_are_skipped_and_counted():
    options = {"compressor": DynamiQCompressor.paper(), "start_step": 0, "min_numel": 6000}
    (metrics, _) = run_ranks(train_briefly, 2, options)
    assert set(metrics.skips) == {"small"}
    assert metrics.compressed_calls > 0


def train_briefly(rank, options):
    model = Known()
    with pipeline(**options) as used:
        ddp = hooked(model, used)
        for step in range(3):
            backward(ddp, model, rank, step)
        return used.metrics()


# State that a format keeps for each bucket.


def keep_residuals(rank, steps):
    """The residuals of a bucket have its size: after the rebuild, none may meet another's."""
    model = Known()
    with pipeline(ErrorFeedback(DynamiQCompressor.paper(4)), start_step=0) as used:
        ddp = hooked(model, used)
        exact = means(model, 2, 0)["e"]
        total, errors = torch.zeros(64, 64), []
        for step in range(1, steps + 1):
            backward(ddp, model, rank, 0)
            total += model.e.grad
            errors.append((total / step - exact).square().mean().sqrt().item())
        return errors, total


def test_residuals_survive_the_rebuild_of_buckets():
    """What one step loses the next ones send: the mean over steps comes ever nearer."""
    (errors, total), (_, other) = run_ranks(keep_residuals, 2, 24)
    assert same_bits(total, other)
    assert errors[-1] < 1.4 * errors[2] / 8, "as 1 / steps; without residuals as its root"


class Twins(nn.Module):
    """Two parameters of one shape, with gradients of very different sizes."""

    def __init__(self):
        super().__init__()
        self.small, self.large = (nn.Parameter(torch.zeros(50, 60)) for _ in range(2))

    def forward(self, factor):
        return 1e-3 * (self.small * factor).sum() + 100 * (self.large * factor).sum()


def tell_twins_apart(rank):
    model = Twins()
    factor = torch.linspace(-1, 1, 3000).view(50, 60)
    with pipeline(AdaptiveFixedPoint(), start_step=0) as used:
        ddp = hooked(model, used)
        for _ in range(4):
            ddp.zero_grad()
            ddp(factor).backward()
        return [
            (parameter.grad / scale - factor).abs().max().item()
            for parameter, scale in ((model.small, 1e-3), (model.large, 100.0))
        ]


def test_buckets_of_equal_shapes_have_states_of_their_own():
    """The format takes as many bytes as the call before needed: 1 for small, 3 for large."""
    for small, large in run_ranks(tell_twins_apart, 2):
        assert 1e-3 < small < 2e-2
        assert large < 1e-6


@pytest.mark.soak
@pytest.mark.parametrize("optimizer", ["ddp_optimizer", "python_reducer"])
def test_compiled_models(optimizer):
    """Both ways in which torch.compile calls hooks: per bucket, and per parameter in place."""
    run_ranks(train_compiled, 2, optimizer, timeout_s=600)


def train_compiled(rank, optimizer):
    warnings.simplefilter("ignore")  # the compiler's own; runs in a process of its own
    torch._dynamo.config.optimize_ddp = optimizer
    model = nn.Linear(30, 10)
    ddp = DistributedDataParallel(model)
    used = pipeline()
    ddp.register_comm_hook(None, used.ddp_hook)
    compiled = torch.compile(ddp, backend="aot_eager")
    enabled = contextlib.nullcontext()
    if optimizer == "python_reducer":
        autograd = torch.compile(backend="aot_eager")
        enabled = torch._dynamo.compiled_autograd._enable(autograd)
    try:
        with enabled:
            for _ in range(4):
                model.zero_grad()
                compiled(torch.full((4, 30), rank + 1.0)).sum().backward()
                assert torch.equal(model.weight.grad, torch.full((10, 30), 6.0))
                assert torch.equal(model.bias.grad, torch.full((10,), 4.0))
    except InputError as error:
        assert optimizer == "python_reducer"
        assert "torch._dynamo.config.optimize_ddp" in str(error)
    used.close()


# Errors reach the user, from backward(), on every rank, as what they are.


def caught(function):
    """Return type, text and duration of the error that a function must raise."""
    began = time.monotonic()
    with pytest.raises(Exception) as error:
        function()
    return type(error.value), str(error.value), time.monotonic() - began


def meet_a_nan(rank, compressor, options, bad_step, topology=None):
    """Rank 1 has a NaN in one step; return what is raised, and whether training can go on."""
    model = Known()
    with pipeline(compressor, topology, start_step=1, on_nonfinite="raise") as used:
        ddp = hooked(model, used, **options)
        for step in range(6):
            given = factors(model, rank, step)
            ddp.zero_grad()
            if step == bad_step:
                if rank == 1:
                    given["c"][7] = torch.nan
                error = caught(lambda: ddp(given).backward())  # noqa: B023 - called here
            else:
                ddp(given).backward()
                if compressor.kind == "uncompressed":
                    assert_gradients(model, means(model, 3, step))
        return error


@pytest.mark.parametrize("bad_step", [0, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
    ],
    ids=str,
)
def test_a_nan_raises_from_backward_on_every_rank(options, bad_step):
    """As itself; and training may go on, as with GradScaler."""
    for kind, text, seconds in run_ranks(meet_a_nan, 3, Uncompressed("fp32"), options, bad_step):
        assert kind is NonFiniteError, text
        for part in (
            "DDP bucket",
            f"of step {bad_step}",
            "holds a NaN or an infinity",
            "every rank raises this",
            "parameters of shapes [",
        ):
            assert part in text
        assert seconds < 20


def test_a_nan_raises_with_compression_too():
    for kind, text, _ in run_ranks(meet_a_nan, 3, DynamiQCompressor.paper(), {}, 3):
        assert kind is NonFiniteError, text


def meet_a_sparse_nan(rank, compressor):
    model = Embedded()
    with pipeline(compressor, start_step=1, on_nonfinite="raise") as used:
        ddp = hooked(model, used)
        for step in range(6):
            ddp.zero_grad()
            loss = ddp(torch.tensor([1, 2 + rank])).sum()
            if step == 3:
                loss = loss * (torch.nan if rank == 1 else 1.0)
                error = caught(loss.backward)
            else:
                loss.backward()
                assert all(p.grad.to_dense().isfinite().all() for p in model.parameters())
        return error


@pytest.mark.parametrize(
    "compressor", [Uncompressed("fp32"), DynamiQCompressor.paper()], ids=lambda c: c.kind
)
def test_a_nan_of_a_sparse_model_raises_from_backward(compressor):
    for kind, text, _ in run_ranks(meet_a_sparse_nan, 3, compressor):
        assert kind is NonFiniteError, text


def configure_otherwise(rank, model):
    used = pipeline(DynamiQCompressor.paper(5 + rank // 2))
    ddp = hooked(model, used)
    rows = torch.tensor([1])
    return caught(
        lambda: ddp(factors(model, rank, 0) if isinstance(model, Known) else rows).sum().backward()
    )


@pytest.mark.parametrize("model", [Known, Embedded])
def test_another_configuration_raises_from_backward(model):
    for kind, text, _ in run_ranks(configure_otherwise, 3, model()):
        assert kind is AgreementError, text
        assert "compressor: rank 0 has" in text
        assert '"bit_budget": 6.0' in text
        assert "same arguments on every rank" in text


def differ_in_a_call(rank):
    """After two steps rank 1 does something else."""
    model = Known()
    used = pipeline()
    ddp = hooked(model, used)
    for step in range(2):
        backward(ddp, model, rank, step)
    if rank == 1:
        return caught(lambda: used.all_reduce(torch.ones(5)))
    return caught(lambda: backward(ddp, model, rank, 2))


def test_a_rank_in_another_call_raises_from_backward():
    for kind, text, _ in run_ranks(differ_in_a_call, 2):
        assert kind is AgreementError, text
        assert "ranks are not in the same call" in text


def stay_away(rank, model):
    """Rank 1 stays away from the third step."""
    used = pipeline(timeout_s=3.0)
    ddp = hooked(model, used)

    def step(number):
        ddp.zero_grad()
        known = isinstance(model, Known)
        given = factors(model, rank, number) if known else torch.tensor([number, rank])
        ddp(given).sum().backward()

    for number in range(2):
        step(number)
    if rank == 1:
        time.sleep(6)
        return caught(lambda: step(2))
    return caught(lambda: step(2)), caught(lambda: used.all_reduce(torch.ones(5)))


@pytest.mark.parametrize("model", [Known, Embedded])
def test_a_rank_that_stays_away_ends_in_an_error_on_all(model):
    (first, second), late = run_ranks(stay_away, 2, model())
    kind, text, seconds = first
    assert kind is PeerTimeoutError, text
    assert "rank 0 waited 3 s for 16 bytes from rank 1" in text
    # With two buckets in flight either wait may be the first to run out.
    assert re.search(r"DDP bucket \d of step 2", text)
    assert seconds < 20
    assert second[:2] == first[:2], "the pipeline keeps its first error"
    assert issubclass(late[0], DynamiqError), late[1]


# How the hook looks from outside.


def test_the_hook_is_what_ddp_accepts():
    """A bound method with a name, whose second parameter is called bucket."""
    hook = Pipeline(Uncompressed(), Ring(), GlooTransport()).ddp_hook
    assert inspect.ismethod(hook)
    assert (hook.__name__, hook.__qualname__) == ("ddp_hook", "Pipeline.ddp_hook")
    parameters = list(inspect.signature(hook).parameters.values())
    assert [p.name for p in parameters] == ["state", "bucket"]
    assert parameters[1].annotation in (dist.GradBucket, inspect.Parameter.empty)


def unpickle_and_train(rank, pickled):
    model = Known()
    hook = pickle.loads(pickled)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, hook)
    backward(ddp, model, rank, 0)
    assert_gradients(model, means(model, 2, 0))
    hook.__self__.close()


def test_the_hook_is_pickled_before_there_is_a_group():
    hook = Pipeline(Uncompressed(), Ring(), GlooTransport(), min_numel=0).ddp_hook
    run_ranks(unpickle_and_train, 2, pickle.dumps(hook))


def stay_alone(rank):
    """What else crosses the group is not compressed, and not disturbed."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pipeline(DynamiQCompressor.paper(), start_step=0) as used:
        ddp = hooked(model, used)
        for _ in range(3):
            metric = torch.tensor([rank + 0.123456789])
            work = dist.all_reduce(metric, async_op=True)
            ddp(torch.randn(16, 8)).square().sum().backward()
            work.wait()
            assert metric.item() == pytest.approx(1 + 2 * 0.123456789, abs=1e-6)
        ddp.eval()
        return model[1].running_mean


def test_other_traffic_is_left_alone():
    run_ranks(stay_alone, 2)
