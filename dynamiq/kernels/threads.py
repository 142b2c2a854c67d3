"""The one owner of the threads that host kernels run on, whoever calls them.

Torch's own threads are not used: their pool belongs to the thread that calls it, so that a
pipeline's worker would get a second one.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Lock

import torch

_LEAST = 64
"""Supergroups below which a part is not worth waking a thread for."""
_PARTS_PER_THREAD = 4

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_size = 0


def in_parts(work: Callable[[int, int], None], count: int) -> None:
    """Call work(first, last) on parts that make up range(count), on torch.get_num_threads() cores.

    The caller's thread is one of them. The first error of any part is raised once all have ended.
    """
    threads = min(torch.get_num_threads(), count // _LEAST)
    if threads <= 1:
        work(0, count)
        return
    parts = threads * _PARTS_PER_THREAD
    left = deque((count * i // parts, count * (i + 1) // parts) for i in range(parts))

    def take_parts() -> None:
        while True:
            try:
                first, last = left.popleft()
            except IndexError:
                return
            work(first, last)

    others: list[Future[None]] = []
    try:
        _start(take_parts, threads - 1, others)
        take_parts()
    finally:
        # The parts use the caller's memory: none may run on after this, nor begin.
        left.clear()
        others = [other for other in others if not other.cancel()]
        _wait(others)
    for other in others:
        other.result()


def _wait(others: list[Future[None]]) -> None:
    """Wait for work that has begun; an interrupt, such as Ctrl-C, has its effect after that."""
    interrupt: BaseException | None = None
    while not all(other.done() for other in others):
        try:
            wait(others)
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = error
    if interrupt is not None:
        raise interrupt


def _start(work: Callable[[], None], copies: int, started: list[Future[None]]) -> None:
    """Start work in so many threads of the pool, or in as many as the system lets us have."""
    global _pool, _size
    with _lock:
        if _pool is None or _size < copies:
            # Threads of a smaller pool end once their work is done.
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool, _size = ThreadPoolExecutor(copies, "dynamiq-kernel"), copies
        # A limit on threads, or the interpreter's end: the caller's thread does all the work then.
        with contextlib.suppress(RuntimeError):
            while len(started) < copies:
                started.append(_pool.submit(work))


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _lock, _pool, _size
    _lock, _pool, _size = Lock(), None, 0


os.register_at_fork(after_in_child=_forget)
