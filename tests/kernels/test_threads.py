"""The threads of the host kernels: every part once, the same results, and no trace of failures."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core.layout import Layout
from dynamiq.kernels import host, threads
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.wire import Address
from dynamiq.kernels.threads import in_parts
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call


@pytest.fixture(autouse=True)
def one_thread_elsewhere():
    yield
    torch.set_num_threads(1)


def call(numel, rounding="stochastic", world_size=4):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(3))
    quantizer = operations.quantizer((2, 4, 8), rounding)
    address = Address(seed=1, call=2, hop=3, sender=0, world_size=world_size)
    return Call.of(x, Layout(numel, 1, 256), quantizer, address, tile_count=3)


def results(c):
    """Return what all operations write."""
    payload, sums, again = c.payload(), c.sums(), c.payload()
    ops.compress(c.values, c.tiles, c.quantizer, payload)
    ops.decompress_accumulate(payload, c.values, sums, c.tiles, c.quantizer)
    both = (c.tiles, c.tiles)
    ops.decompress_accumulate_recompress(payload, c.values, both, c.quantizer, again)
    decoded, stored = (operations.fresh(c.result) for _ in range(2))
    ops.decompress(payload, decoded, c.tiles, c.quantizer)
    ops.store(c.values, c.tiles.units, stored)
    written = [r.bucket.entries.nan_to_num() for r in (decoded, stored)]
    return [*ops.statistics(c.values.bucket, 4), payload, sums, again, *written]


def same(results, expected):
    return all(map(torch.equal, results, expected))


@given(st.integers(0, 5000), st.integers(1, 9))
def test_parts_hold_every_index_once(count, thread_count):
    torch.set_num_threads(thread_count)
    parts = []
    in_parts(lambda first, last: parts.append((first, last)), count)
    assert Counter(i for first, last in parts for i in range(first, last)) == Counter(range(count))


def test_parts_run_at_the_same_time_in_as_many_threads_as_torch_has():
    torch.set_num_threads(3)
    barrier = threading.Barrier(3, timeout=20)
    first_of_thread = threading.local()

    def work(first, last):
        if not hasattr(first_of_thread, "seen"):
            first_of_thread.seen = True
            barrier.wait()

    in_parts(work, 3 * 64)


def test_little_work_stays_in_the_callers_thread():
    torch.set_num_threads(3)
    seen = []
    in_parts(lambda first, last: seen.append((first, last, threading.get_ident())), 127)
    assert seen == [(0, 127, threading.get_ident())]


def test_results_do_not_depend_on_the_threads():
    c = call(150_000)
    torch.set_num_threads(1)
    expected = results(c)
    for count in (2, 3, 5):
        torch.set_num_threads(count)
        assert same(results(c), expected)


def test_results_do_not_depend_on_other_callers():
    calls = [call(70_000 + 1000 * i) for i in range(4)]
    expected = [results(c) for c in calls]
    wrong = []

    def compute(i):
        torch.set_num_threads(2 + i)  # the pool grows under the hands of the others
        wrong.extend(i for _ in range(10) if not same(results(calls[i]), expected[i]))

    run_together(compute, 4)
    assert not wrong


def test_the_pool_may_grow_while_others_use_it():
    totals = []

    def compute(i):
        for k in range(100):
            torch.set_num_threads(2 + (i + k) % 7)
            done = []
            in_parts(lambda first, last, done=done: done.append(last - first), 1000)
            totals.append(sum(done))

    run_together(compute, 5)
    assert totals == [1000] * 500


def run_together(function, count):
    """Call function(i) in threads of their own; raise what they raised."""
    errors = []

    def run(i):
        try:
            function(i)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    started = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def test_a_call_lets_other_python_threads_run(monkeypatch):
    c = call(2**20, "correlated", world_size=64)
    counted, during, ended = [0], [], threading.Event()
    library = host.library("supergroups", "FP32")
    kernel = library._functions["compress"]

    def count():
        while not ended.is_set():
            counted[0] += 1

    def observed(*arguments):
        before = counted[0]
        kernel(*arguments)
        during.append(counted[0] - before)

    monkeypatch.setitem(library._functions, "compress", observed)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        while len(during) < 20 and max(during, default=0) < 100:  # a busy machine may need a few
            ops.compress(c.values, c.tiles, c.quantizer, c.payload())
    finally:
        ended.set()
        thread.join()
    assert max(during) >= 100


@pytest.mark.parametrize("failing", ["caller", "another"])
def test_an_error_is_raised_once_no_part_runs(failing):
    torch.set_num_threads(4)
    caller, running, begun = threading.get_ident(), [], []

    def work(first, last):
        running.append(first)
        begun.append(first)
        time.sleep(0.02)
        running.remove(first)
        if (threading.get_ident() == caller) == (failing == "caller"):
            raise ValueError(failing)

    with pytest.raises(ValueError, match=failing):
        in_parts(work, 10_000)
    ended = len(begun)
    assert not running
    time.sleep(0.1)
    assert len(begun) == ended
    in_parts(lambda first, last: None, 10_000)


def test_without_more_threads_the_caller_does_the_work(monkeypatch):
    def refuse(self, *_):
        raise RuntimeError("can't start new thread")

    torch.set_num_threads(4)
    monkeypatch.setattr(threads.ThreadPoolExecutor, "submit", refuse)
    seen = []
    in_parts(lambda first, last: seen.extend(range(first, last)), 1000)
    assert sorted(seen) == list(range(1000))


FORK = """
import os, threading, time, torch
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.threads import in_parts
from tests.kernels.test_threads import call
c, payload, again = (x := call(70_000)), x.payload(), x.payload()
torch.set_num_threads(3)
ops.compress(c.values, c.tiles, c.quantizer, payload)
in_parts(lambda first, last: time.sleep(0.01), 1000)  # both of the other threads are needed
assert sum(t.name.startswith("dynamiq-kernel") for t in threading.enumerate()) == 2
child = os.fork()
ops.compress(c.values, c.tiles, c.quantizer, again)
# Torch's own threads do not survive a fork: no torch.equal here, and no exit handlers there.
right = payload.numpy().tobytes() == again.numpy().tobytes()
if not child:
    os._exit(not right)
assert right and os.waitpid(child, 0)[1] == 0
"""

AT_EXIT = """
import atexit, torch
from tests.kernels.test_threads import call, results, same
c = call(70_000)
torch.set_num_threads(3)
expected = results(c)
atexit.register(lambda: print(same(results(c), expected)))
"""


def run_python(program):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_fork_after_use_has_threads_of_its_own():
    done = run_python(FORK)
    assert done.returncode == 0, done.stderr


def test_kernels_run_until_the_very_end_of_a_process():
    done = run_python(AT_EXIT)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_an_interrupt_waits_until_no_part_runs():
    """Parts use the caller's memory, which is given up while an exception unwinds."""
    running = []

    def work(first, last):
        running.append(first)
        time.sleep(0.3 if threading.current_thread() is not threading.main_thread() else 0.0)
        running.remove(first)

    torch.set_num_threads(3)
    main = threading.main_thread().ident
    timer = threading.Timer(0.1, signal.pthread_kill, [main, signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        in_parts(work, 64 * 12)
    assert not running


def test_a_small_call_does_not_wait_behind_a_long_one():
    """Copies of its work that have not begun when it is done are taken back."""
    torch.set_num_threads(3)
    long = threading.Thread(target=in_parts, args=(lambda first, last: time.sleep(0.2), 64 * 12))
    long.start()
    time.sleep(0.05)
    began = time.monotonic()
    in_parts(lambda first, last: None, 64 * 12)
    assert time.monotonic() - began < 0.15
    long.join()
