"""One call of a pipeline, watched: on all ranks, and on their network interfaces."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from evaluation.bench.collectives import TIMEOUT_S
from evaluation.bench.records import Traced, TraceTask, Warm
from evaluation.bench.runs import PROGRAM, start_clock
from evaluation.bench.traffic import competing
from evaluation.launch import Workers
from evaluation.network import Hosts
from evaluation.records import Record

_PERIOD_S = 0.002


class Trace(Record):
    """A call as it was.

    Attributes:
        task: what was traced.
        call: what the ranks noted.
        sent: of each rank, what its interface had sent by when: seconds on the ranks' clock, and
            bytes since the first of them.
    """

    task: TraceTask
    call: Traced
    sent: tuple[tuple[tuple[float, int], ...], ...]


def trace(task: TraceTask) -> Trace:
    """Run the ranks and watch one call.

    Raises:
        NetworkError: hosts cannot be made.
        WorkerError: a rank failed.
    """
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts(task.world_size, rate_mbit=task.rate_mbit))
        workers = stack.enter_context(Workers(PROGRAM, task, hosts, timeout_s=TIMEOUT_S))
        samples = stack.enter_context(_watching(workers.pids, hosts.interface))
        for answer in workers.rows():
            if isinstance(answer, Warm):
                stack.enter_context(competing(hosts, task.flows))
                start_clock(workers)
            elif isinstance(answer, Traced):
                call = answer
    began_s, ended_s = min(call.began_s), max(call.ended_s)
    return Trace(
        task=task, call=call, sent=tuple(_during(rank, began_s, ended_s) for rank in samples)
    )


@contextmanager
def _watching(pids: Sequence[int], interface: str) -> Iterator[list[list[tuple[float, int]]]]:
    """Note, until the block ends, what each process's interface has sent so far."""
    samples: list[list[tuple[float, int]]] = [[] for _ in pids]
    paths = [Path(f"/proc/{pid}/net/dev") for pid in pids]
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(_PERIOD_S):
            for path, own in zip(paths, samples, strict=True):
                try:
                    own.append((time.perf_counter(), _sent_bytes(path.read_text(), interface)))
                except OSError:
                    return  # the process has ended

    thread = threading.Thread(target=watch, name="interfaces", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stopped.set()
        thread.join()


def _sent_bytes(table: str, interface: str) -> int:
    for line in table.splitlines():
        name, _, fields = line.partition(":")
        if name.strip() == interface:
            return int(fields.split()[8])
    return 0  # the process is about to enter its namespace


def _during(
    samples: Sequence[tuple[float, int]], began_s: float, ended_s: float
) -> tuple[tuple[float, int], ...]:
    """Return the samples of that time and one on either side, counted from the first."""
    inside = [i for i, (at_s, _) in enumerate(samples) if began_s <= at_s <= ended_s]
    if not inside:
        return ()
    kept = samples[max(0, inside[0] - 1) : inside[-1] + 2]
    return tuple((at_s, count - kept[0][1]) for at_s, count in kept)
