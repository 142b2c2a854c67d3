"""A call in flight, as its caller sees it."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynamiq.core.errors import ClosedError


class Handle:
    """An asynchronous call: wait for it, or hand its future to DDP."""

    def __init__(self, check_may_block: Callable[[], None]) -> None:
        """Create a call that has not ended.

        Args:
            check_may_block: Raises where waiting would never end.
        """
        self._check_may_block = check_may_block
        self._ended = threading.Event()
        self._result: Tensor | None = None
        self._error: BaseException | None = None
        self._future: Any = torch.futures.Future()

    def done(self) -> bool:
        """Return whether the call has ended, well or badly."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> Tensor:
        """Return the result once the call has ended.

        Raises:
            TimeoutError: It has not ended within ``timeout_s``; it goes on.
            DynamiqError: The call failed.
            InputError: Called in a callback of another call's future, where it would never end.
        """
        if not self.done():
            self._check_may_block()
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the call has not ended within {timeout_s} s; it goes on")
        return self._outcome()

    def future(self) -> torch.futures.Future[Tensor]:
        """Return a torch future that ends with the result or raises the call's own error."""
        future: torch.futures.Future[Tensor] = self._future
        return future

    @property
    def error(self) -> BaseException | None:
        """What the call failed with, once it has ended."""
        return self._error

    def finish(self, result: Tensor | None, error: BaseException | None) -> None:
        """End the call (for whoever runs it)."""
        self._result, self._error = result, error
        self._ended.set()
        if error is None:
            self._future.set_result(result)
        elif isinstance(error, Exception):
            self._future.set_exception(error)
        else:  # torch's futures do not carry KeyboardInterrupt and the like
            self._future.set_exception(ClosedError(f"{type(error).__name__} interrupted the call"))

    def _outcome(self) -> Tensor:
        if self._error is not None:
            raise self._error.with_traceback(None)  # each raise would add to it
        assert self._result is not None
        return self._result
