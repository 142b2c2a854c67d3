"""Memory of an all-reduce: the payloads and one working buffer at most, and the same for ever."""

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynamiq import (
    Butterfly,
    Direct,
    DynamiQCompressor,
    GlooTransport,
    Hierarchical,
    Layout,
    Ring,
)
from dynamiq.compressors.dynamiq.encoding import DynamiQEncoding
from dynamiq.core.compressor import State
from dynamiq.core.message import Call, Message
from tests.integrations.worlds import build
from tests.processes import run_ranks

PAPER = DynamiQCompressor.paper()
WORKING_BYTES = 4
"""Per padded entry."""
MEGABYTE = 1 << 20
MEMORY = Path("/proc/self/statm")


class Allocations(TorchDispatchMode):
    """Follows every tensor that this thread's operators make until its memory is freed.

    Attributes:
        live_bytes: Of tensors that are there.
        peak_bytes: Most that there were at once.
        at_peak: What there was then: bytes by operator and how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.at_peak: dict[str, int] = {}
        self._live: dict[int, tuple[int, str]] = {}
        self._lock = threading.RLock()  # memory may be freed by another thread, or while we count

    def __torch_dispatch__(self, function, types, args=(), kwargs=None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {self._identity(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(result):
            # Views, and results that are arguments, are no new memory.
            if isinstance(x, Tensor) and self._identity(x) not in given:
                self._add(x, str(function))
        return result

    def _identity(self, x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def _add(self, x: Tensor, made_by: str) -> None:
        storage, identity = x.untyped_storage(), self._identity(x)
        with self._lock:
            if identity in self._live:
                return
            self._live[identity] = storage.nbytes(), made_by
            self.live_bytes += storage.nbytes()
            weakref.finalize(storage, self._free, identity)
            if self.live_bytes > self.peak_bytes:
                self.peak_bytes = self.live_bytes
                self.at_peak = {}
                for nbytes, name in self._live.values():
                    self.at_peak[name] = self.at_peak.get(name, 0) + nbytes

    def _free(self, identity: int) -> None:
        with self._lock:
            self.live_bytes -= self._live.pop(identity)[0]


def test_allocations_are_followed():
    x = torch.ones(100)
    with Allocations() as seen:
        y = x + 1
        z = y.view(10, 10)[2:]
        y.add_(1)
        assert (seen.live_bytes, seen.peak_bytes) == (400, 400)
        w = y.double()
        assert (seen.live_bytes, seen.peak_bytes) == (1200, 1200)
        del w, y
        assert seen.live_bytes == 400
        del z
        assert (seen.live_bytes, seen.peak_bytes) == (0, 1200)
    assert seen.at_peak == {"aten.add.Tensor": 400, "aten._to_copy.default": 800}


def all_reduces(rank, topology, numel, dtype, segments, steps):
    """Return live and peak bytes of every step, and what there was at the highest peak."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(numel, generator=generator).to(dtype)
    measured = []
    options = {"compressor": PAPER, "topology": topology, "segments": segments}
    with build(GlooTransport(), **options) as pipeline, Allocations() as seen:
        pipeline.connect()
        gc.freeze()  # collections look at what is new, not at all of torch
        for _ in range(steps):
            seen.peak_bytes = seen.live_bytes
            pipeline.all_reduce(x)
            gc.collect()
            measured.append((seen.live_bytes, seen.peak_bytes))
        gc.unfreeze()
    return measured, seen.at_peak


def payload_bytes(numel: int, n: int) -> tuple[int, int]:
    """Return the bytes of one payload for every chunk, and the padded entries."""
    layout = Layout(numel, n, 256)
    statistics = torch.ones(2 * layout.units)
    encoding = PAPER.encode(statistics, layout, Ring().schedule(n), Call(), State())
    assert isinstance(encoding, DynamiQEncoding)
    everything = range(encoding.positions)
    payloads = (encoding.payload_bytes(Message(c, c, n, 0), everything) for c in range(n))
    return sum(payloads), layout.padded_numel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("topology", "n", "segments"),
    [
        *((Ring(), 2, 1), (Ring(), 4, 1), (Ring(), 4, 3)),
        *((Butterfly(), 2, 1), (Butterfly(), 4, 1), (Butterfly(), 5, 1), (Butterfly(), 4, 3)),
        (Direct(), 4, 1),
    ],
)
def test_an_all_reduce_needs_the_payloads_and_one_working_buffer(topology, n, segments, dtype):
    """Statistics, order and widths included, and what transports keep from call to call."""
    numel = 100_000
    payloads, padded = payload_bytes(numel, n)
    limit = payloads + WORKING_BYTES * padded
    steps = GlooTransport.channels + 3
    for measured, at_peak in run_ranks(all_reduces, n, topology, numel, dtype, segments, steps):
        peaks = [peak for _, peak in measured]
        largest = sorted(at_peak.items(), key=lambda item: -item[1])
        assert max(peaks) <= limit, f"{max(peaks)} of {limit} bytes; made by {largest[:5]}"
        # Once every channel has been used: of each, the transport keeps the last exchange.
        assert measured[-1] == measured[-2], "memory grows from call to call"


@pytest.mark.parametrize(("n", "g"), [(4, 2), pytest.param(4, 4, marks=pytest.mark.soak)])
def test_two_levels_need_two_working_buffers(n, g):
    """Float32 of all entries inside the node, and of what a column has: sums, and a copy of them.

    What lies in buffers, a slice for each of four messages, is kept from call to call.
    """
    numel, steps = 100_000, GlooTransport.channels + 3
    topology = Hierarchical(ranks_per_node=g)
    padded = Layout(numel, g, 256).padded_numel
    arguments = topology, numel, torch.float32, 1, steps
    for measured, _ in run_ranks(all_reduces, n, *arguments):
        for live, peak in measured[-2:]:
            assert peak - live <= WORKING_BYTES * (padded + padded // g) + 16
        assert measured[-1] == measured[-2], "memory grows from call to call"


def let_go(rank, topology):
    """Return whether a tensor's memory is free once its call has ended and nobody refers to it."""
    with build(GlooTransport(), topology=topology) as pipeline:
        x = torch.ones(50_000)
        freed = threading.Event()
        weakref.finalize(x.untyped_storage(), freed.set)
        pipeline.all_reduce(x)
        assert not freed.is_set()
        del x
        gc.collect()
        return freed.is_set()


@pytest.mark.parametrize(
    "topology",
    [
        Hierarchical(ranks_per_node=2),
        *(
            pytest.param(t, marks=pytest.mark.soak)
            for t in (Ring(), Hierarchical(ranks_per_node=4))
        ),
    ],
    ids=str,
)
def test_nothing_holds_on_to_a_tensor_after_its_call(topology):
    """Transports keep their last exchange: it must not be the user's memory."""
    assert run_ranks(let_go, 4, topology) == [True] * 4


def resident_bytes() -> int:
    return int(MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def many_all_reduces(rank, topology, steps):
    """Return the resident memory after every hundred steps, one in two in the background."""
    resident = []
    with build(GlooTransport(), compressor=PAPER, topology=topology) as pipeline:
        for step in range(steps):
            x = torch.full((50_000,), float(rank + step))
            handle = pipeline.all_reduce(x, async_op=step % 2 == 0)
            if handle is not None:
                handle.wait()
            if step % 100 == 99:
                resident.append(resident_bytes())
    return resident


@pytest.mark.soak
@pytest.mark.skipif(not MEMORY.exists(), reason="needs /proc/self/statm for resident memory")
@pytest.mark.parametrize(
    ("topology", "n"),
    [(Ring(), 2), (Butterfly(), 2), (Direct(), 2), (Hierarchical(ranks_per_node=2), 4)],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_a_thousand_steps_grow_nothing(topology, n):
    for resident in run_ranks(many_all_reduces, n, topology, 1000, timeout_s=600):
        assert resident[-1] - resident[2] < MEGABYTE, resident
