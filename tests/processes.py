"""Real processes for tests of distributed code: ``run_ranks``.

``run_ranks(function, n, *args)`` calls ``function(rank, *args)`` in n processes at once, with
torch.distributed initialised (Gloo) for just this call, and returns what each rank returned:

    def sum_of_ranks(rank, offset):
        x = torch.tensor([rank + offset])
        dist.all_reduce(x)
        return x.item()

    def test_sum():
        assert run_ranks(sum_of_ranks, 4, 10) == [46] * 4

* ``function`` is defined at the top of a module, so that other processes can import it; arguments
  and results are pickled, by value. Write ``def`` beside the test, not a lambda or a closure.
* The processes are kept and used again by later calls of the same pytest run, in all modules: the
  first call costs a second, later ones milliseconds. A process in which anything failed is
  replaced. So a function leaves nothing behind that matters: modules it imports stay imported.
* An exception in any rank fails the test with that rank's traceback (:class:`RankError`, all ranks
  that failed within a grace time). To test for an exception, catch it in the function and return
  it or its text.
* Nothing hangs: after ``timeout_s`` the stacks of all threads of the late ranks are put into the
  error and the processes are killed. They also end when the test process ends, however it ends.
* One thread per rank for torch's operators; warnings are errors, as in pytest itself.

For tests of faults: ``lost={2}`` says that rank 2 may die or never answer; its result is None, and
it is killed once the others have answered. A function may kill or stop its own process
(``os.kill(os.getpid(), signal.SIGKILL)`` or ``SIGSTOP``).

For tests of what happens before ``init_process_group``: ``group=False`` leaves that call to the
function, as ``join_group(rank, n)``.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import itertools
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# How long other ranks may go on after the first failure, to fail for reasons of their own.
GRACE_S = 5.0


class RankError(Exception):
    """A rank raised, died or did not answer in time."""


@dataclass(frozen=True)
class Task:
    """What one process is asked to do.

    Attributes:
        call: The pickled (function, arguments).
        path: Where the caller finds modules.
        rank: The rank that the process plays.
        world_size: Number of ranks.
        port: Where the test process keeps a store through which ranks find each other.
        number: The number of the call; each has a part of the store to itself.
        group: Whether torch.distributed is initialised around the call.
    """

    call: bytes
    path: tuple[str, ...]
    rank: int
    world_size: int
    port: int
    number: int
    group: bool


class Worker:
    """One process, seen from the test process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # Each process is a fork of one that has imported these and started no thread.
        context.set_forkserver_preload(["pytest", "torch", "torch.distributed"])
        self.stacks = tempfile.NamedTemporaryFile(prefix="stacks-")  # noqa: SIM115
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.stacks.name), daemon=True)
        self.process.start()
        theirs.close()

    def stack_traces(self) -> str:
        """Make the process write down what all its threads do."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.2)
        threads = Path(self.stacks.name).read_text(errors="replace").split("\n\n")
        # The frames from the rank's function inwards are of interest.
        return "\n\n".join(_OWN_FRAMES.split(t)[0] for t in threads if "follow_parent" not in t)

    def kill(self) -> None:
        """End the process, even if it is stopped."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stacks.close()


_OWN_FRAMES = re.compile(r"\n.*processes\.py\", line \d+ in _do\b")
_workers: list[Worker] = []
_numbers = itertools.count()
_here: Task | None = None
"""In a worker: the task that is being done."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    lost: Collection[int] = (),
    group: bool = True,
) -> list[Any]:
    """Call ``function(rank, *args)`` in ``world_size`` processes; return the results by rank.

    Raises:
        RankError: A rank raised, died (unless in ``lost``), or took longer than ``timeout_s``.
    """
    _workers[:] = [worker for worker in _workers if worker.process.is_alive()]
    while len(_workers) < world_size:
        _workers.append(Worker())
    try:
        answers = _call(pickle.dumps((function, args)), world_size, set(lost), timeout_s, group)
    except BaseException:
        # Their answers would be taken for those to the next call.
        _kill(range(world_size))
        raise
    failed = {rank: text for rank, (ok, text) in answers.items() if not ok}
    _kill(range(world_size) if failed else lost)
    if failed:
        name = getattr(function, "__name__", function)
        raise RankError(
            "\n\n".join(f"rank {r} of {world_size} in {name}:\n{t}" for r, t in failed.items())
        )
    return [answers[rank][1] if rank in answers else None for rank in range(world_size)]


def join_group(rank: int, world_size: int, *, timeout_s: float = 60.0) -> None:
    """Call ``init_process_group`` in a function that was run with ``group=False``."""
    assert _here is not None, "join_group is for functions run by run_ranks"
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore("127.0.0.1", _here.port, timeout=timeout)
    store = dist.PrefixStore(f"call-{_here.number}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _call(
    call: bytes, world_size: int, lost: set[int], timeout_s: float, group: bool
) -> dict[int, tuple[bool, Any]]:
    number = next(_numbers)
    for rank in range(world_size):
        task = Task(call, tuple(sys.path), rank, world_size, _store().port, number, group)
        _workers[rank].connection.send_bytes(pickle.dumps(task))
    return _collect(world_size, lost, timeout_s)


@cache
def _store() -> dist.TCPStore:
    """A store that outlives all ranks, on a port that was free, as torchrun keeps one."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _kill(ranks: Collection[int]) -> None:
    for rank in sorted(ranks, reverse=True):
        _workers.pop(rank).kill()


def _collect(world_size: int, lost: set[int], timeout_s: float) -> dict[int, tuple[bool, Any]]:
    """Wait for the answers (succeeded, result or text) of all ranks that are not lost."""
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout_s
    ranks = {_workers[rank].connection: rank for rank in range(world_size)}
    while set(ranks.values()) - lost:
        ready = wait(list(ranks), deadline - time.monotonic())
        for connection in ready:
            rank = ranks.pop(connection)
            try:
                answers[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                if rank not in lost:
                    _workers[rank].process.join()
                    code = _workers[rank].process.exitcode
                    answers[rank] = False, f"the process ended with exit code {code}"
            if rank in answers and not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if not ready:
            failed = not all(ok for ok, _ in answers.values())
            reason = "no answer, also not after another rank failed" if failed else "no answer"
            for rank in set(ranks.values()) - lost:
                stacks = _workers[rank].stack_traces()
                answers[rank] = False, f"{reason} (limit {timeout_s:g} s); its threads:\n{stacks}"
            break
    return answers


@atexit.register
def _end() -> None:
    _kill(range(len(_workers)))


def _serve(connection: Connection, stacks: str) -> None:
    """Do tasks until the test process is gone; runs in the worker."""
    parent = multiprocessing.parent_process()

    def follow_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, daemon=True).start()
    if sys.platform == "linux":
        # A stopped process cannot follow by itself, so the fork server, whose end this descriptor
        # delays, takes it along: PR_SET_PDEATHSIG.
        os.close(forkserver._forkserver._forkserver_alive_fd)
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    with Path(stacks).open("w") as file, contextlib.suppress(EOFError):
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        while True:
            task: Task = pickle.loads(connection.recv_bytes())
            try:
                answer = pickle.dumps((True, _do(task)))
            except BaseException:  # noqa: BLE001 - it is reported by the test process
                answer = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(answer)


def _do(task: Task) -> Any:
    global _here  # noqa: PLW0603
    sys.path[:] = task.path
    function, args = pickle.loads(task.call)
    _here = task
    if task.group:
        join_group(task.rank, task.world_size)
        # A rank that returns at once would close connections that others are still making.
        dist.barrier()
    try:
        return function(task.rank, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
