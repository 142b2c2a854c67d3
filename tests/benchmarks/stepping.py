"""Instructions that a function executes, counted one by one: the same on a busy machine.

Linux only: a child process runs the function under ptrace, a few microseconds an instruction. Of
vector instructions each counts once.
"""

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable

_TRACE_ME, _SINGLE_STEP = 0, 9


def executed(function: Callable[[], object]) -> int:
    """Return how many instructions a child executes in a function, and in a little around it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        child = os.fork()  # Python 3.12 warns where there are threads; the child needs none of them
    if child == 0:
        try:
            libc.ptrace(_TRACE_ME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            function()
        finally:
            os._exit(0)  # nothing of the parent's may run on here
    steps = 0
    try:
        while os.WIFSTOPPED(os.waitpid(child, 0)[1]):
            if libc.ptrace(_SINGLE_STEP, child, None, None):
                raise OSError(ctypes.get_errno(), "ptrace is not allowed here")
            steps += 1
    except OSError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return steps


def executed_per_item(work: Callable[[int, int], object], some: int) -> float | None:
    """Return the instructions of work(first, last) per item, or None where nobody can count.

    It is the difference between 2 · some items and some, which leaves out what a call costs.
    """
    if sys.platform != "linux":
        return None
    try:
        more, fewer = (executed(lambda n=n: work(0, n)) for n in (2 * some, some))
    except OSError:
        return None
    return (more - fewer) / some
