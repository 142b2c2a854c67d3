"""Memory for payloads, used again from call to call."""

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from typing import Any

import torch
from torch import Tensor

_TOLERANCE = 1.25
"""How much larger a block may be than what is asked for."""
_LEAST_BYTES = 4096
"""Less than a page is never fresh from the system."""


def _size(block: Any) -> int:
    return int(block.size)


class Buffers:
    """Blocks that come back when the last tensor that refers to them is gone.

    Memory fresh from the system costs a page fault for every 4 KiB, and a training step meets the
    same buckets over and over. Devices other than the CPU get new tensors, since torch keeps their
    memory itself. Threads may take and drop tensors at any time.

    Attributes:
        made: Blocks that had to be made so far.
    """

    def __init__(self) -> None:
        """Hold nothing."""
        self.made = 0
        self._free: list[Any] = []
        # Tensors may be dropped anywhere, also by a garbage collection in the middle of a take.
        self._returned: deque[Any] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: torch.device) -> Tensor:
        """Return uint8[nbytes] of any content, aligned to 16 bytes."""
        if device.type != "cpu" or nbytes < _LEAST_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        with self._lock:
            block = self._fitting(nbytes)
        lent = block[:nbytes]
        # A tensor's memory refers to this array, not to the block.
        weakref.finalize(lent, self._returned.append, block).atexit = False
        return torch.from_numpy(lent)

    def _fitting(self, nbytes: int) -> Any:
        while self._returned:
            insort(self._free, self._returned.popleft(), key=_size)
        place = bisect_left(self._free, nbytes, key=_size)
        if place < len(self._free) and _size(self._free[place]) <= _TOLERANCE * nbytes:
            return self._free.pop(place)
        if place:
            # The next smaller one makes way: hops' shares of a budget change from time to time.
            del self._free[place - 1]
        self.made += 1
        return torch.empty(nbytes, dtype=torch.uint8).numpy()
