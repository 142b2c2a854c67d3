"""The workers of a run: started, listened to, and ended together.

    with Workers(TRAINING, plan, network) as workers:
        for row in workers.rows():
            ...

However the block ends, no worker is left: not after Ctrl-C, not when one of them dies.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Generic, Self, TypeVar

from evaluation.interruption import interruptions_raise, uninterrupted
from evaluation.network import Network
from evaluation.records import DistributedPlan, FinalRow, Seat, StepRow, WorkerConfig, read_row

R = TypeVar("R")
PYTHON = (sys.executable, "-m")
_ROOT = Path(__file__).absolute().parent.parent
_TAIL_LINES = 15
_GRACE_S = 60


@dataclass(frozen=True)
class Program(Generic[R]):
    """What workers run.

    Attributes:
        command: what starts one; ``--config JSON`` is appended, a ``WorkerConfig``.
        read: returns the row that rank 0 wrote on one line.
        is_last: whether a row is the last one of a run that went well.
    """

    command: Sequence[str]
    read: Callable[[str], R]
    is_last: Callable[[R], bool]


TRAINING = Program[StepRow | FinalRow](
    (*PYTHON, "evaluation.worker"),
    read_row,
    lambda row: isinstance(row, FinalRow),
)


@dataclass(frozen=True)
class _Ended:
    """A process has ended (or, with code 0 once more for rank 0, its output has)."""

    rank: int
    code: int


class WorkerError(RuntimeError):
    """A worker ended early. The message names it and closes with the last lines it wrote."""


class Workers(Generic[R]):
    """One process per rank of a plan, as a context manager.

    Args:
        program: what runs in them.
        plan: what they are to do.
        network: where they run.
        timeout_s: how long a worker waits for a silent peer before it gives up.
    """

    def __init__(
        self,
        program: Program[R],
        plan: DistributedPlan,
        network: Network,
        *,
        timeout_s: float = 300,
    ) -> None:
        self.program = program
        self.plan = plan
        self._network = network
        self._timeout_s = timeout_s
        self._processes: list[subprocess.Popen[str]] = []
        self._errors: list[IO[str]] = []
        self._threads: list[threading.Thread] = []
        # In the order in which things happen: the first worker to fail is the cause, the others
        # follow because they lost it.
        self._events: queue.SimpleQueue[str | _Ended] = queue.SimpleQueue()
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        self._signals.enter_context(interruptions_raise())
        try:
            port = _free_port()
            for rank in range(self.plan.world_size):
                self._start(rank, port)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end()

    @property
    def pids(self) -> list[int]:
        """The process ids, by rank."""
        return [process.pid for process in self._processes]

    def rows(self) -> Iterator[R]:
        """Yield rank 0's rows as they come, until all workers have ended.

        Raises:
            WorkerError: a worker failed, or rank 0 ended without its last row.
        """
        left, finished = self.plan.world_size + 1, False
        while left:
            try:
                event = self._events.get(timeout=_GRACE_S if finished else None)
            except queue.Empty:
                raise WorkerError("a worker did not end after the last step") from None
            if isinstance(event, str):
                row = self.program.read(event)
                finished = self.program.is_last(row)
                yield row
                continue
            left -= 1
            if event.code:
                raise self._failure(event)
        if not finished:
            raise WorkerError("the workers ended before their run was complete")

    def _start(self, rank: int, port: int) -> None:
        seat = Seat(
            rank=rank,
            address=self._network.address(0),
            port=port,
            launcher_pid=os.getpid(),
            timeout_s=self._timeout_s,
        )
        config = WorkerConfig(plan=self.plan, seat=seat).model_dump_json()
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed in _end
        self._errors.append(errors)
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": self._network.interface,
            "OMP_NUM_THREADS": "1",  # several ranks share few cores
            "TOKENIZERS_PARALLELISM": "false",
        }
        process = subprocess.Popen(
            self._network.command(rank, [*self.program.command, "--config", config]),
            cwd=_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=errors,
            text=True,
            start_new_session=True,  # a Ctrl-C at the terminal is ours to act on
        )
        self._processes.append(process)
        self._watch(lambda: self._events.put(_Ended(rank, process.wait())))
        if rank == 0:
            self._watch(lambda: self._read(process))

    def _watch(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._events.put(line)
        self._events.put(_Ended(0, 0))

    def _failure(self, ended: "_Ended") -> WorkerError:
        errors = self._errors[ended.rank]
        errors.seek(0)
        tail = "".join(errors.readlines()[-_TAIL_LINES:]).rstrip()
        said = f"; its last lines:\n{tail}" if tail else " and wrote nothing"
        return WorkerError(f"the worker of rank {ended.rank} {_ending(ended.code)}{said}")

    def _end(self) -> None:
        with self._signals, uninterrupted():
            for process in self._processes:
                if process.poll() is None:
                    # Whatever a worker started (a compiler, say) is of its process group.
                    os.killpg(process.pid, signal.SIGKILL)
            for thread in self._threads:
                thread.join()
            self._processes.clear()
            self._threads.clear()
            for errors in self._errors:
                errors.close()
            self._errors.clear()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _ending(code: int) -> str:
    return f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
