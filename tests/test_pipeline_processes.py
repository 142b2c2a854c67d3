"""Pipelines between real processes over Gloo: the bits of lockstep, and every error as itself."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dynamiq import (
    AgreementError,
    Butterfly,
    Direct,
    DynamiQCompressor,
    DynamiqError,
    GlooTransport,
    OmniReduceCompressor,
    PeerLostError,
    PeerTimeoutError,
    Pipeline,
    Ring,
    TransportError,
    Uncompressed,
)
from tests.contracts import compressor as contract
from tests.contracts.compressor import sample, uneven_bounds
from tests.integrations.worlds import build, integers, lockstep, same
from tests.processes import join_group, run_ranks

PAPER = DynamiQCompressor.paper()
DESCRIPTORS = Path("/proc/self/fd")
WIDE = DynamiQCompressor.local(9.0, widths=(1, 4, 16), rounding="stochastic")


def connected(group=None, timeout_s=30.0, **options):
    return build(GlooTransport(group, timeout_s=timeout_s), **options)


def all_reduce(rank, x, op, options, background):
    """All-reduce rank's row of x[n, ...], twice."""
    with connected(**options) as pipeline:
        results = [x[rank].clone() for _ in range(2)]
        handles = [pipeline.all_reduce(t, op, async_op=background) for t in results]
        for handle in filter(None, handles):
            handle.wait()
        return results


@pytest.mark.parametrize(
    ("compressor", "topology", "world_size", "op", "background", "segments", "dtype"),
    [
        (PAPER, Ring(), 2, "sum", False, 1, torch.float32),
        (PAPER, Ring(), 3, "mean", True, 1, torch.float32),
        (PAPER, Butterfly(), 3, "sum", True, 1, torch.bfloat16),
        (PAPER, Butterfly(), 4, "mean", False, 1, torch.float16),
        (PAPER, Butterfly(), 5, "sum", False, 1, torch.float32),
        (PAPER, Direct(), 5, "mean", True, 3, torch.float32),
        (OmniReduceCompressor(), Butterfly(), 3, "mean", True, 2, torch.bfloat16),
        (WIDE, Ring(), 4, "sum", True, 1, torch.float32),
        (Uncompressed("bf16"), Ring(), 3, "mean", True, 7, torch.float32),
        (Uncompressed("bf16"), Butterfly(), 5, "sum", True, 3, torch.float32),
        (Uncompressed("fp64"), Butterfly(), 2, "mean", False, 2, torch.float32),
        (Uncompressed("fp16"), Ring(), 5, "mean", False, 1, torch.float16),
    ],
)
def test_a_run_is_its_simulation(compressor, topology, world_size, op, background, segments, dtype):
    x = sample(world_size, 1937).to(dtype)
    options = {"compressor": compressor, "topology": topology, "segments": segments}
    results = run_ranks(all_reduce, world_size, x, op, options, background)
    for number in range(2):
        expected = lockstep(x, compressor, topology, op, number)
        assert same([r[number] for r in results], expected)


def test_strides_and_empty_tensors():
    x = integers(3, 40, 6).transpose(1, 2)
    for tensors in (x, x[:, :, ::2], x[:, :0]):
        results = run_ranks(all_reduce, 3, tensors, "sum", {}, True)
        # The second call adds up other copies of the same rows.
        for number in range(2):
            assert same([r[number].contiguous() for r in results], tensors.sum(0).contiguous())


def reduce_scatter(rank, x, bounds):
    with connected(compressor=PAPER) as pipeline:
        out = torch.empty(bounds[rank + 1] - bounds[rank])
        pipeline.reduce_scatter(out, x[rank], bounds=bounds)
        return out


def test_reduce_scatter_with_an_empty_slice():
    x, bounds = sample(3, 1500), uneven_bounds(1500, 3)
    call = contract.Call(divisor=3)
    expected = contract.reduce_scatter(PAPER, Ring(), x, bounds, call=call).outs
    assert all(map(contract.same_bits, run_ranks(reduce_scatter, 3, x, bounds), expected))


def in_a_subgroup(rank, x):
    """Ranks 1 and 3 of 4 work together; the others are not disturbed."""
    members = dist.new_group([1, 3])
    if rank in (0, 2):
        return None
    with connected(members, compressor=PAPER) as pipeline:
        mine = x[rank // 2].clone()
        pipeline.all_reduce(mine)
        dist.barrier(members)
        return pipeline.rank, pipeline.world_size, mine


def test_a_subgroup():
    """Ranks and the mean's divisor are the group's."""
    x = sample(2, 900)
    _, first, _, second = run_ranks(in_a_subgroup, 4, x)
    assert first[:2] == (0, 2)
    assert second[:2] == (1, 2)
    assert same([first[2], second[2]], lockstep(x, PAPER, Ring(), "mean"))


def with_other_traffic(rank, x):
    """Two pipelines and the user's own collectives, all in flight at once."""
    with connected(compressor=PAPER) as one, connected(topology=Butterfly()) as two:
        a, b, c = x[rank].clone(), x[rank].clone(), x[rank].clone()
        handles = [one.all_reduce(a, "sum", async_op=True), two.all_reduce(b, "sum", async_op=True)]
        dist.all_reduce(c)
        for handle in handles:
            handle.wait()
        return a, b, c


def test_pipelines_and_other_traffic_do_not_mix():
    x = integers(3, 2000)
    a, b, c = zip(*run_ranks(with_other_traffic, 3, x), strict=True)
    assert same(a, lockstep(x, PAPER, Ring()))
    assert same(b, x.sum(0))
    assert same(c, x.sum(0))


def verified(rank, x):
    with connected(compressor=PAPER, verify_every=1) as pipeline:
        mine = x[rank].clone()
        pipeline.all_reduce(mine, "sum", async_op=True).wait()
        pipeline.close()
        return mine, pipeline.metrics()


def test_metrics():
    x = sample(3, 3000)
    results = run_ranks(verified, 3, x)
    exact = x.double().sum(0)
    for result, metrics in results:
        error = (result.double() - exact).square().sum() / exact.square().sum()
        assert metrics.vnmse == pytest.approx(error.item(), rel=1e-9)
    sent, received = (
        sum(getattr(m, f) for _, m in results) for f in ("bytes_sent", "bytes_received")
    )
    assert sent == received > 0


def caught(function):
    """Return the type and the text of the error that a function must raise."""
    with pytest.raises(DynamiqError) as error:
        function()
    return type(error.value), str(error.value)


def differ_at_connect(rank):
    pipeline = connected(seed=rank // 2)
    return caught(lambda: pipeline.all_reduce(torch.ones(5)))


def test_different_configurations():
    for kind, text in run_ranks(differ_at_connect, 3):
        assert kind is AgreementError
        assert "seed: rank 0 has 0, rank 2 has 1" in text


def differ_in_a_call(rank, background):
    """A Gloo receive that is smaller than its message would abort the process."""
    pipeline = connected(compressor=PAPER)
    for _ in range(3):
        pipeline.all_reduce(torch.ones(1000))
    x = torch.ones(500_000 if rank == 1 else 900)

    def call():
        handle = pipeline.all_reduce(x, async_op=background)
        if handle is not None:
            handle.wait()

    error = caught(call)
    assert (x == 1).all()
    assert caught(call) == error
    return error


@pytest.mark.parametrize("background", [False, True])
def test_different_sizes(background):
    for rank, (kind, text) in enumerate(run_ranks(differ_in_a_call, 3, background)):
        assert kind is AgreementError
        assert f"rank {rank} is in #3" in text
        assert "[500000]" in text
        assert "[900]" in text


def lose_a_peer(rank, fault):
    pipeline = connected(timeout_s=1.0 if fault == "silent" else 30.0)
    pipeline.all_reduce(torch.ones(1000))
    if rank == 1:
        if fault == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "closed":
            pipeline.close()
            return None
        time.sleep(60)
    began = time.monotonic()
    error = caught(lambda: pipeline.all_reduce(torch.ones(1000), async_op=True).wait())
    return error, time.monotonic() - began


@pytest.mark.parametrize("fault", ["dead", "closed", "silent"])
def test_a_peer_that_is_gone(fault):
    results = run_ranks(lose_a_peer, 2, fault, lost=() if fault == "closed" else {1})
    (kind, text), seconds = results[0]
    assert kind is (PeerTimeoutError if fault == "silent" else PeerLostError)
    assert "rank 1" in text
    assert "call 1 (all_reduce)" in text
    assert seconds < 15


def connect_too_early(rank):
    pipeline = connected()
    kind, text = caught(lambda: pipeline.all_reduce(torch.ones(5)))
    join_group(rank, 2)
    x = torch.ones(5)
    pipeline.all_reduce(x, "sum")
    pipeline.close()
    return kind, text, x


def test_a_pipeline_may_be_used_before_there_is_a_group_and_again_afterwards():
    for kind, text, x in run_ranks(connect_too_early, 2, group=False):
        assert kind is TransportError
        assert "call torch.distributed.init_process_group first" in text
        assert torch.equal(x, torch.full((5,), 2.0))


def build_and_close(rank, times):
    """Pipelines that come and go leave nothing behind that the next one could meet."""
    for number in range(times):
        pipeline = Pipeline(Uncompressed(), Ring(), GlooTransport(), min_numel=0)
        x = torch.full((10,), float(number))
        pipeline.all_reduce(x, "sum", async_op=number % 2 == 0)
        pipeline.close()
        assert (x == 2 * number).all()
    return len(list(DESCRIPTORS.iterdir())), threading.active_count()


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="needs /proc/self/fd to count open files")
def test_pipelines_come_and_go():
    few, many = (run_ranks(build_and_close, 2, times) for times in (3, 15))
    assert many == few, "open files or threads are left behind"
