"""The one owner of the threads that host kernels run on, whoever calls them.

Torch's own threads are not used: their pool belongs to the thread that calls it, so that a
pipeline's worker would get a second one.
"""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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

    The caller's thread is one of them. Errors of any part are raised once all have ended.
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

    others = [_pool_of(threads - 1).submit(take_parts) for _ in range(threads - 1)]
    try:
        take_parts()
    finally:
        # The parts use the caller's memory: none may run on after this.
        for other in others:
            other.result()


def _pool_of(size: int) -> ThreadPoolExecutor:
    """Return the pool, with at least ``size`` threads."""
    global _pool, _size
    with _lock:
        if _pool is None or _size < size:
            # Threads of a smaller pool end once their work is done.
            if _pool is not None:
                _pool.shutdown(wait=False)
            _pool, _size = ThreadPoolExecutor(size, "dynamiq-kernel"), size
        return _pool


def _forget() -> None:
    """A forked child has none of its parent's threads."""
    global _lock, _pool, _size
    _lock, _pool, _size = Lock(), None, 0


os.register_at_fork(after_in_child=_forget)
