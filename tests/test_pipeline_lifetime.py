"""What a pipeline keeps alive, and what it leaves behind."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dynamiq import (
    ClosedError,
    DynamiQCompressor,
    LoopbackTransport,
    Pipeline,
    Ring,
    TransportError,
)


def eventually(condition) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
    return bool(condition())


def several_calls(transport):
    pipeline = Pipeline(DynamiQCompressor.paper(), Ring(), transport, min_numel=0)
    tensors = [torch.randn(3000) for _ in range(8)]
    for handle in [pipeline.all_reduce(x, async_op=True) for x in tensors]:
        handle.wait()
    return pipeline, [weakref.ref(x) for x in tensors]


def test_tensors_and_threads_are_let_go():
    before = threading.active_count()
    with ThreadPoolExecutor(2) as threads:
        results = list(threads.map(several_calls, LoopbackTransport.world(2)))
    assert eventually(lambda: not any(ref() is not None for _, refs in results for ref in refs))
    assert threading.active_count() > before
    results.clear()  # dropped, not closed
    assert eventually(lambda: threading.active_count() == before)


def test_a_block_left_by_an_error_tells_the_peers_at_once():
    def leave(transport):
        with (
            pytest.raises(ZeroDivisionError),
            Pipeline(DynamiQCompressor.paper(), Ring(), transport) as pipeline,
        ):
            pipeline.connect()
            _ = 1 / 0
        with pytest.raises(ClosedError, match="left by ZeroDivisionError"):
            pipeline.all_reduce(torch.ones(10))

    def stay(transport):
        pipeline = Pipeline(DynamiQCompressor.paper(), Ring(), transport)
        with pytest.raises(TransportError, match="lost rank 0"):
            pipeline.all_reduce(torch.ones(10))

    began = time.monotonic()
    zero, one = LoopbackTransport.world(2, timeout_s=60)
    with ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(leave, zero), threads.submit(stay, one)]:
            ended.result()
    assert time.monotonic() - began < 30


def test_a_second_pipeline_leaves_the_firsts_transport_alone():
    (transport,) = LoopbackTransport.world(1)
    first = Pipeline(DynamiQCompressor.paper(), Ring(), transport)
    first.connect()
    with (
        pytest.raises(TransportError, match="connected already"),
        Pipeline(DynamiQCompressor.paper(), Ring(), transport) as second,
    ):
        second.connect()
    x = torch.ones(10)
    first.all_reduce(x)
    assert torch.equal(x, torch.ones(10))
