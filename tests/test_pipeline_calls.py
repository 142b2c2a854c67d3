"""How calls are made and counted: in flight, in order, skipped, verified, measured."""

import pickle
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq import (
    Butterfly,
    ClosedError,
    Direct,
    DynamiQCompressor,
    GlooTransport,
    Handle,
    InputError,
    LoopbackTransport,
    Pipeline,
    Ring,
    Uncompressed,
    measure_error,
    vnmse,
)
from tests.contracts.compressor import same_bits, sample, uneven_bounds
from tests.integrations.worlds import build, integers, lockstep, rank_of, run_world, same
from tests.probes import AdaptiveFixedPoint

PAPER = DynamiQCompressor.paper()
TOPOLOGIES = [Ring(), Butterfly()]
every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.kind)


# Asynchronous calls.


@pytest.mark.parametrize("topology", [*TOPOLOGIES, Direct()], ids=lambda t: t.kind)
@pytest.mark.parametrize("rendezvous", [False, True])
def test_several_calls_in_flight(topology, rendezvous):
    """More than there are channels; each gives what it gives alone."""
    tensors = [sample(3, 400 * (i + 1), seed=i) for i in range(7)]

    def run(pipeline):
        mine = [x[rank_of(pipeline)].clone() for x in tensors]
        handles = [pipeline.all_reduce(tensor, "sum", async_op=True) for tensor in mine]
        assert all(isinstance(handle, Handle) for handle in handles)
        for handle, tensor in zip(reversed(handles), reversed(mine), strict=True):
            assert handle.wait() is tensor
            assert handle.done()
        return mine

    results = run_world(run, 3, compressor=PAPER, topology=topology, rendezvous=rendezvous)
    for number, (x, *outs) in enumerate(zip(tensors, *results, strict=True)):
        assert same(outs, lockstep(x, PAPER, topology, number=number))


def test_calls_in_flight_are_on_the_wire_together():
    """Rank 1 begins when rank 0 has sent something of four calls: none waits for another's end."""
    seen, all_seen = set(), threading.Event()

    def run(pipeline):
        pipeline.connect()
        if rank_of(pipeline) == 0:
            post = pipeline.transport.post

            def watched(*arguments):
                seen.add(arguments[5].partition(" (")[0])
                if len(seen) == pipeline.transport.channels:
                    all_seen.set()
                return post(*arguments)

            pipeline.transport.post = watched
        elif not all_seen.wait(5):
            raise AssertionError(f"only {seen} began")
        mine = [torch.ones(100) for _ in range(6)]
        for handle in [pipeline.all_reduce(x, "sum", async_op=True) for x in mine]:
            handle.wait()
        return mine[5]

    assert same(run_world(run, 2), torch.full((100,), 2.0))
    assert len(seen) == 6


def test_ranks_may_wait_in_different_orders_and_at_different_times():
    tensors = [integers(4, 3000) for _ in range(3)]

    def run(pipeline):
        rank = rank_of(pipeline)
        mine = [x[rank].clone() for x in tensors]
        handles = []
        for tensor in mine:
            time.sleep(0.01 * rank)
            handles.append(pipeline.all_reduce(tensor, "sum", async_op=True))
        for i in range(3):
            handles[(i + rank) % 3].wait()
        return mine

    for x, *outs in zip(tensors, *run_world(run, 4), strict=True):
        assert same(outs, x.sum(0))


def test_calls_with_the_same_key_follow_each_other():
    """The state of one is the state the next begins with, although both are in flight."""
    x = [100.0**i * sample(3, 700, seed=i) for i in range(4)]

    def run(pipeline, background):
        mine = [t[rank_of(pipeline)].clone() for t in x]
        handles = [pipeline.all_reduce(t, "sum", key="same", async_op=background) for t in mine]
        for handle in filter(None, handles):
            handle.wait()
        return mine

    options = {"compressor": AdaptiveFixedPoint()}
    waiting = run_world(lambda p: run(p, False), 3, **options)
    in_flight = run_world(lambda p: run(p, True), 3, **options)
    for one, other in zip(waiting, in_flight, strict=True):
        assert all(map(same_bits, one, other))


def test_a_blocking_call_waits_behind_those_in_flight():
    x = integers(2, 500)

    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        handle = pipeline.all_reduce(torch.ones(20_000), async_op=True)
        pipeline.all_reduce(mine, "sum")
        handle.wait()
        return mine

    assert same(run_world(run, 2), x.sum(0))


def test_an_asynchronous_reduce_scatter_returns_its_output():
    x = integers(3, 9)

    def run(pipeline):
        out = torch.empty(3)
        handle = pipeline.reduce_scatter(out, x[rank_of(pipeline)], "sum", async_op=True)
        assert handle.wait() is out
        return out

    assert torch.equal(torch.cat(run_world(run, 3)), x.sum(0))


def test_the_future_ends_with_the_result():
    def run(pipeline):
        mine = torch.full((40,), float(rank_of(pipeline)))
        future = pipeline.all_reduce(mine, "sum", async_op=True).future()
        doubled = future.then(lambda ended: 2 * ended.value())
        assert future.wait() is mine
        return doubled.wait()

    assert same(run_world(run, 3), torch.full((40,), 6.0))


def test_a_wait_may_give_up_while_the_call_goes_on():
    """Rank 0 does not come until rank 1 has given up once."""
    gave_up = threading.Event()

    def run(pipeline):
        mine = torch.ones(10)
        if rank_of(pipeline) == 0:
            pipeline.connect()
            gave_up.wait(10)
            pipeline.all_reduce(mine, "sum")
            return mine
        handle = pipeline.all_reduce(mine, "sum", async_op=True)
        with pytest.raises(TimeoutError, match=r"not ended within 0\.05 s; it goes on"):
            handle.wait(timeout_s=0.05)
        assert not handle.done()
        gave_up.set()
        return handle.wait(timeout_s=10)

    assert same(run_world(run, 2), torch.full((10,), 2.0))


def test_callbacks_may_start_calls_but_not_wait_for_them():
    """They run in the thread that runs all calls, which would wait for itself."""

    def run(pipeline):
        started, refused = [], []

        def callback(_):
            with pytest.raises(InputError, match="callback") as error:
                pipeline.all_reduce(torch.ones(5))
            refused.append(str(error.value))
            with pytest.raises(InputError, match="callback"):
                pipeline.all_reduce(torch.ones(5), async_op=True).wait()
            started.append(pipeline.all_reduce(torch.ones(5), "sum", async_op=True))

        pipeline.all_reduce(torch.ones(5), async_op=True).future().then(callback).wait()
        assert "use async_op=True" in refused[0]
        return started[0].wait()

    assert same(run_world(run, 2), torch.full((5,), 2.0))


def test_closing_waits_for_calls_in_flight():
    x = sample(3, 50_000)

    def run(pipeline):
        mine = [x[rank_of(pipeline)].clone() for _ in range(3)]
        handles = [pipeline.all_reduce(t, "sum", async_op=True) for t in mine]
        pipeline.close()
        assert all(handle.done() for handle in handles)
        return handles[2].wait()

    expected = lockstep(x, PAPER, Ring(), number=2)
    assert same(run_world(run, 3, compressor=PAPER), expected)


def test_closing_while_a_callback_starts_a_call():
    """The late call is refused or done, but nobody waits for ever."""

    def run(pipeline):
        outcomes = []

        def callback(_):
            time.sleep(0.1)
            try:
                outcomes.append(pipeline.all_reduce(torch.ones(5), async_op=True))
            except ClosedError as error:
                outcomes.append(error)

        pipeline.all_reduce(torch.ones(5), async_op=True).future().then(callback)
        pipeline.close()
        return outcomes

    for outcomes in run_world(run, 2, limit_s=15):
        assert len(outcomes) == 1


def test_threads_of_one_rank_take_turns():
    """Calls of two threads do not mix; the ranks' orders are made equal by waiting."""
    barrier = threading.Barrier(2)

    def run(pipeline):
        totals = []

        def call(value):
            tensor = torch.full((100,), value)
            pipeline.all_reduce(tensor, "sum")
            totals.append(tensor[0].item())

        pipeline.connect()
        for value in (1.0, 2.0, 3.0):
            barrier.wait(10)
            thread = threading.Thread(target=call, args=(value,))
            thread.start()
            thread.join(10)
        return totals

    assert run_world(run, 2) == [[2.0, 4.0, 6.0]] * 2


def test_no_thread_is_started_before_it_is_needed():
    def ours():
        return {t for t in threading.enumerate() if t.name.startswith("dynamiq")}

    def run(pipeline):
        before = ours()
        pipeline.all_reduce(torch.ones(10))
        assert ours() == before
        pipeline.all_reduce(torch.ones(10), async_op=True).wait()
        started = ours() - before
        pipeline.close()
        return started

    (started,) = run_world(run, 1)
    assert started
    for thread in started:
        thread.join(5)
        assert not thread.is_alive(), "a thread outlives its pipeline"


calls = st.fixed_dictionaries(
    {
        "numel": st.sampled_from([0, 1, 2, 16, 255, 256, 257, 1000, 3000]),
        "op": st.sampled_from(["mean", "sum"]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
        "key": st.sampled_from(["a", "b"]),
        "background": st.booleans(),
        "scatter": st.booleans(),
    }
)
options = st.fixed_dictionaries(
    {
        "compressor": st.sampled_from([PAPER, Uncompressed("bf16"), AdaptiveFixedPoint()]),
        "topology": st.sampled_from(TOPOLOGIES),
        "segments": st.integers(1, 4),
        "rendezvous": st.booleans(),
        "verify_every": st.sampled_from([None, None, 2]),
        "on_nonfinite": st.sampled_from(["propagate", "raise"]),
    }
)


@pytest.mark.soak
@settings(max_examples=400)
@given(st.integers(1, 6), st.lists(calls, min_size=1, max_size=12), options)
def test_any_calls_in_any_order(world_size, calls, options):
    """Blocking or in flight, mixed at will: nothing hangs, and all ranks have good results."""
    inputs = [sample(world_size, c["numel"], seed=i).to(c["dtype"]) for i, c in enumerate(calls)]

    def run(pipeline):
        rank, outs, handles = rank_of(pipeline), [], []
        for call, x in zip(calls, inputs, strict=True):
            mine, bounds = x[rank].clone(), uneven_bounds(call["numel"], world_size)
            rest = {"op": call["op"], "key": call["key"], "async_op": call["background"]}
            if call["scatter"]:
                outs.append(torch.empty(bounds[rank + 1] - bounds[rank], dtype=x.dtype))
                handles.append(pipeline.reduce_scatter(outs[-1], mine, bounds=bounds, **rest))
            else:
                outs.append(mine)
                handles.append(pipeline.all_reduce(mine, **rest))
        for handle in filter(None, handles):
            handle.wait()
        pipeline.close()
        return outs

    results = run_world(run, world_size, **options)
    for call, x, *outs in zip(calls, inputs, *results, strict=True):
        exact = x.double().sum(0) / (world_size if call["op"] == "mean" else 1)
        result = torch.cat(outs) if call["scatter"] else outs[0]
        assert vnmse(result, exact) < 0.1
        assert call["scatter"] or same(outs, outs[0])


# One rank alone.


def test_one_rank_needs_nobody():
    (transport,) = LoopbackTransport.world(1)
    with build(transport, compressor=PAPER, verify_every=1) as pipeline:
        x = torch.tensor([1.0, -0.0, torch.nan, torch.inf, 2.0**-149])
        before = x.clone()
        pipeline.all_reduce(x)
        assert same_bits(x, before)
        out = torch.empty(5)
        pipeline.reduce_scatter(out, x)
        assert same_bits(out, before)
        assert pipeline.metrics().bytes_sent == 0
        assert (pipeline.rank, pipeline.world_size) == (0, 1)


# Counting.


def metrics_of(function, world_size, **options):
    def run(pipeline):
        function(pipeline)
        return pipeline.metrics()

    return run_world(run, world_size, **options)


def test_a_new_pipeline_has_done_nothing():
    (transport,) = LoopbackTransport.world(1)
    metrics = build(transport).metrics()
    assert (metrics.calls, metrics.bytes_sent, metrics.bits_per_entry) == (0, 0, 0.0)
    assert (metrics.skips, metrics.vnmse, metrics.verified_calls) == ({}, None, 0)


@every_topology
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_bytes_add_up(world_size, topology):
    """What is sent is received, as much as the simulation says, within the budget."""
    x = sample(world_size, 5000)
    metrics = metrics_of(
        lambda p: p.all_reduce(x[rank_of(p)].clone(), "sum"),
        world_size,
        compressor=PAPER,
        topology=topology,
    )
    report = measure_error(x, PAPER, topology)
    assert tuple(m.bytes_sent for m in metrics) == report.bytes_sent
    assert sum(m.bytes_received for m in metrics) == sum(m.bytes_sent for m in metrics)
    headers = 16 * sum(len(topology.schedule(world_size).peers(r)) for r in range(world_size))
    padded = -(-5000 // 256) * 256
    volume = 2 * (world_size - 1) * padded
    assert 8 * (sum(m.bytes_sent for m in metrics) - headers) / volume <= 5.0 + 1e-9
    for m in metrics:
        assert m.bits_per_entry == pytest.approx(8 * m.bytes_sent / (volume / world_size))
    assert all(m.codec_s > 0 and m.wire_s >= 0 for m in metrics)


@every_topology
def test_a_reduce_scatter_stays_within_the_budget(topology):
    x = sample(4, 4 * 5120)

    def scatter(pipeline):
        pipeline.reduce_scatter(torch.empty(5120), x[rank_of(pipeline)].clone())

    metrics = metrics_of(scatter, 4, compressor=PAPER, topology=topology)
    headers = 16 * sum(len(topology.schedule(4).peers(r)) for r in range(4))
    bits = 8 * (sum(m.bytes_sent for m in metrics) - headers) / (3 * 4 * 5120)
    assert 4.7 < bits <= 5.0


def test_bits_of_a_reduce_scatter_are_of_one_pass():
    x = sample(2, 2 * 51_200)

    def scatter(pipeline):
        pipeline.reduce_scatter(torch.empty(51_200), x[rank_of(pipeline)].clone())

    for m in metrics_of(scatter, 2, compressor=PAPER):
        assert m.bits_per_entry == pytest.approx(8 * m.bytes_sent / 51_200)


def test_uncompressed_bytes():
    """FP32 over a ring: 2 (n - 1) / n · 4 bytes per entry, and the headers."""
    for m in metrics_of(lambda p: p.all_reduce(torch.ones(1200)), 3):
        assert m.bytes_sent == m.bytes_received == 2 * 2 * 400 * 4 + 2 * 16
        assert (m.calls, m.compressed_calls) == (1, 1)


@pytest.mark.parametrize("background", [False, True])
def test_skips_are_counted_with_their_reasons(background):
    """No call falls back in silence."""
    calls = [
        torch.ones(99),
        torch.ones(100),
        torch.ones(0),
        torch.ones(500).double(),
        torch.ones(5).double(),
        torch.ones(500).half(),
    ]

    def run(pipeline):
        for tensor in calls:
            handle = pipeline.all_reduce(tensor.clone(), async_op=background)
            if handle is not None:
                handle.wait()
        out = torch.empty(10)
        pipeline.reduce_scatter(out, torch.ones(20))
        return pipeline.metrics()

    for metrics in run_world(run, 2, compressor=PAPER, min_numel=100):
        assert metrics.skips == {"small": 3, "float64": 2}
        assert (metrics.calls, metrics.compressed_calls) == (7, 2)


def test_a_small_call_travels_as_it_is():
    """The default limit is 65,536 entries."""
    x = sample(2, 65_536)

    def run(pipeline):
        small, large = x[rank_of(pipeline), 1:].clone(), x[rank_of(pipeline)].clone()
        pipeline.all_reduce(small, "sum")
        pipeline.all_reduce(large, "sum")
        return small, large, pipeline.metrics().skips

    (small, large, skips), _ = run_world(run, 2, compressor=PAPER, min_numel=65_536)
    assert same_bits(small, lockstep(x[:, 1:], Uncompressed(), Ring()))
    assert not same_bits(large, lockstep(x, Uncompressed(), Ring(), number=1))
    assert skips == {"small": 1}
    (transport,) = LoopbackTransport.world(1)
    assert Pipeline(PAPER, Ring(), transport).settings.min_numel == 65_536


def test_nothing_is_skipped_that_is_not_compressed_anyway():
    (metrics, _) = metrics_of(lambda p: p.all_reduce(torch.ones(5)), 2, min_numel=100)
    assert (metrics.skips, metrics.compressed_calls) == ({}, 1)


# verify_every.


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_verification_measures_the_error_of_real_calls(op, background):
    """Energy-weighted over the verified calls: the second and the fourth."""
    tensors = [sample(3, 800, seed=i) * 10.0**i for i in range(5)]

    def run(pipeline):
        results = []
        for x in tensors:
            mine = x[rank_of(pipeline)].clone()
            handle = pipeline.all_reduce(mine, op, async_op=background)
            if handle is not None:
                handle.wait()
            results.append(mine)
        pipeline.close()
        return results, pipeline.metrics()

    outcomes = run_world(run, 3, compressor=PAPER, verify_every=2)
    error = norm = 0.0
    for i in (1, 3):
        exact = tensors[i].double().sum(0) / (3 if op == "mean" else 1)
        error += (outcomes[0][0][i].double() - exact).square().sum().item()
        norm += exact.square().sum().item()
    for _, metrics in outcomes:
        assert metrics.verified_calls == 2
        assert metrics.vnmse == pytest.approx(error / norm, rel=1e-9)
        assert metrics.calls == 5
    sent = sum(metrics.verification_bytes_sent for _, metrics in outcomes)
    assert sent == 2 * (2 * 2 * 800 * 8 + 3 * 2 * 16), "FP64 in two passes, and headers"


def test_verification_keeps_copies_of_float64():
    """The caller may write to its tensor as soon as the call has ended."""
    x = sample(2, 800).double() * (1 + 1e-9)

    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        pipeline.all_reduce(mine, "sum", async_op=True).wait()
        result = mine.clone()
        mine.fill_(1e9)
        pipeline.close()
        return result, pipeline.metrics().vnmse

    options = {"compressor": PAPER, "verify_every": 1, "compress_float64": True}
    for result, measured in run_world(run, 2, **options):
        assert measured == pytest.approx(vnmse(result, x.sum(0)), rel=1e-10)


def test_verification_changes_no_result_of_the_first_call():
    """Verification takes call numbers of its own."""
    x = sample(3, 800)

    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        pipeline.all_reduce(mine, "sum")
        return mine

    expected = lockstep(x, PAPER, Ring())
    assert same(run_world(run, 3, compressor=PAPER, verify_every=1), expected)


def test_verification_of_a_reduce_scatter_is_of_the_own_slice():
    x = sample(2, 1600)

    def run(pipeline):
        out = torch.empty(800)
        pipeline.reduce_scatter(out, x[rank_of(pipeline)].clone(), "sum")
        return out, pipeline.metrics().vnmse

    for rank, (out, measured) in enumerate(run_world(run, 2, compressor=PAPER, verify_every=1)):
        exact = x.double().sum(0)[800 * rank : 800 * rank + 800]
        assert measured == pytest.approx(vnmse(out, exact), rel=1e-9)


def test_verification_leaves_skipped_and_non_finite_calls_out():
    def run(pipeline):
        pipeline.all_reduce(torch.ones(10))
        pipeline.all_reduce(torch.full((600,), torch.nan))
        return pipeline.metrics()

    for metrics in run_world(run, 2, compressor=PAPER, verify_every=1, min_numel=100):
        assert (metrics.vnmse, metrics.verified_calls) == (None, 0)
        assert metrics.verification_bytes_sent == 600 * 8 + 16


# The life of a pipeline.


def test_a_pipeline_is_closed_at_the_end_of_its_block():
    def run(pipeline):
        with pipeline as inside:
            assert inside is pipeline
            pipeline.all_reduce(torch.ones(4))
        with pytest.raises(ClosedError, match="the pipeline is closed; build a new one"):
            pipeline.all_reduce(torch.ones(4))
        pipeline.close()
        return pipeline.metrics().calls

    assert run_world(run, 2) == [1, 1]


def test_a_pipeline_may_be_closed_unused():
    (transport,) = LoopbackTransport.world(1)
    pipeline = build(transport)
    pipeline.close()
    pipeline.close()
    with pytest.raises(ClosedError):
        pipeline.connect()


def test_connect_is_idempotent():
    def run(pipeline):
        pipeline.connect()
        pipeline.connect()
        return pipeline.rank, pipeline.world_size

    assert run_world(run, 3) == [(0, 3), (1, 3), (2, 3)]


def test_a_pipeline_pickles_before_there_is_a_group():
    """Launchers that spawn send the bound hook to their processes."""
    pipeline = Pipeline(
        DynamiQCompressor.paper(4, rounding="stochastic"),
        Butterfly(),
        GlooTransport(timeout_s=12),
        seed=7,
        on_nonfinite="raise",
        verify_every=3,
    )
    copy = pickle.loads(pickle.dumps(pipeline))
    assert copy.settings == pipeline.settings
    assert copy.transport.timeout_s == 12
    hook = pickle.loads(pickle.dumps(pipeline.ddp_hook))
    assert hook.__self__.settings == pipeline.settings
    assert hook.__name__ == "ddp_hook"


def test_a_used_pipeline_pickles_without_what_it_has_done():
    pipeline = Pipeline(PAPER, Ring(), GlooTransport())
    pipeline._session._calls = 5
    copy = pickle.loads(pickle.dumps(pipeline))
    assert copy._session._calls == 0
    assert copy.metrics().calls == 0
