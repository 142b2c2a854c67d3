"""Network namespaces that belong to a process: made, used and removed by name.

A name holds the id and the start time of the process that made it, so that a later run knows
which ones nobody will remove any more.
"""

import itertools
import os
import re
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"dynamiq-(?P<pid>\d+)-(?P<started>\d+)-\d+-\w+")
_FOLDER = Path("/run/netns")
_numbers = itertools.count()


class NetworkError(RuntimeError):
    """A network command failed: its message says which one and what it answered."""


def new_prefix() -> str:
    """Return what the names of one set of namespaces begin with; no other set has it."""
    pid = os.getpid()
    return f"dynamiq-{pid}-{_started(pid)}-{next(_numbers)}"


def add(name: str) -> None:
    """Make a namespace. Raises ``NetworkError`` when the system refuses."""
    run(["ip", "netns", "add", name])


def remove(name: str) -> None:
    """Kill what runs in a namespace and remove it, if it exists; its interfaces go with it."""
    if name not in _existing():
        return
    for pid in _answer(["ip", "netns", "pids", name]).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _answer(["ip", "netns", "delete", name])


def remove_leftovers() -> list[str]:
    """Remove the namespaces of this project whose makers are dead, and return their names."""
    removed = []
    for name in _existing():
        maker = _NAME.fullmatch(name)
        if maker and _started(int(maker["pid"])) != maker["started"]:
            remove(name)
            removed.append(name)
    return removed


def configure(name: str, commands: Sequence[str]) -> None:
    """Run ``ip`` commands (written without the ``ip``) inside a namespace."""
    run(["ip", "-n", name, "-batch", "-"], "\n".join(commands) + "\n")


def run(argv: Sequence[str], stdin: str | None = None) -> None:
    """Run a command to its end. Raises ``NetworkError`` with what it answered when it fails."""
    done = _answer(argv, stdin)
    if done.returncode:
        answer = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise NetworkError(f"`{' '.join(argv)}` failed: {answer}")


def _answer(argv: Sequence[str], stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    # Its own process group: a Ctrl-C at the terminal reaches only us, and we clean up.
    return subprocess.run(
        argv, check=False, input=stdin, capture_output=True, text=True, start_new_session=True
    )


def _existing() -> list[str]:
    try:
        return sorted(path.name for path in _FOLDER.iterdir())
    except OSError:
        return []


def _started(pid: int) -> str | None:
    """Return the start time of a process, which tells it from a later one of the same id."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return status.rpartition(")")[2].split()[19]
