"""Order between the caller's CUDA stream and the thread that runs a call.

Work queued by the caller before the call must have happened before the call reads the tensor, and
the call's work before the caller goes on. CPU tensors need neither.
"""

import torch
from torch import Tensor


class Fence:
    """Made in the caller's thread; entered and left in the thread that runs the call."""

    def __init__(self, tensor: Tensor) -> None:
        """Mark what the caller's stream has been given so far."""
        self._device = tensor.device
        self._event: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._event = torch.cuda.current_stream(self._device).record_event()

    def enter(self) -> None:
        """Let this thread's stream wait for what was marked."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def leave(self) -> None:
        """Block until this thread's stream has done its work, so that any stream may go on."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).synchronize()
