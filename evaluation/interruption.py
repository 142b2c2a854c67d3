"""How the processes of an evaluation end: in order, and together.

Ctrl-C, SIGTERM and SIGHUP become exceptions, so that ``with`` blocks can remove what they made.
Python does that for SIGINT alone; the other two would end the process on the spot and leave
network namespaces and worker processes behind.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1


class Interrupted(KeyboardInterrupt):
    """A request to end. A ``KeyboardInterrupt``, so that no ``except Exception`` swallows it.

    Attributes:
        signum: the signal that asked.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process that this signal ended."""
        return 128 + self.signum


@contextmanager
def interruptions_raise() -> Iterator[None]:
    """Raise ``Interrupted`` in the main thread when the process is asked to end.

    A signal that was ignored at the start (a background job's SIGINT) stays ignored. Outside the
    main thread, where Python does not let handlers be set, this does nothing.
    """

    def interrupt(signum: int, _frame: FrameType | None) -> None:
        raise Interrupted(signum)

    with _handling(interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put such signals off until the block has ended: a second Ctrl-C must not stop a clean-up."""
    arrived: list[int] = []

    def remember(signum: int, _frame: FrameType | None) -> None:
        arrived.append(signum)

    with _handling(remember):
        yield
    if arrived:
        signal.raise_signal(arrived[0])


def end_with(parent_pid: int) -> None:
    """Have the kernel end this process when its parent dies, however that happens (Linux).

    Raises:
        SystemExit: the parent is dead already.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit("the launcher ended before this worker began")


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.getsignal(signum) for signum in _SIGNALS}
    handled = [signum for signum, old in before.items() if old is not signal.SIG_IGN]
    for signum in handled:
        signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum in handled:
            signal.signal(signum, before[signum] or signal.SIG_DFL)
