"""Doing the runs of a benchmark: hosts are made, ranks started, and rows come out."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from evaluation.bench.collectives import TIMEOUT_S
from evaluation.bench.records import (
    Answer,
    BenchRow,
    BenchTask,
    Findings,
    Measured,
    Warm,
    read_answer,
)
from evaluation.bench.traffic import competing
from evaluation.launch import PYTHON, Program, Workers
from evaluation.network import Hosts
from evaluation.report import environment
from evaluation.rows import commit, run_missing

PROGRAM = Program[Answer](
    (*PYTHON, "evaluation.bench.worker"), read_answer, lambda row: not isinstance(row, Warm)
)


def rows(tasks: Sequence[BenchTask], path: Path, command: str) -> Iterator[BenchRow]:
    """Do the runs that a file lacks, adding each to it; yields them.

    Raises:
        NetworkError: hosts cannot be made.
        WorkerError: a rank failed.
    """
    return run_missing(tasks, path, BenchRow, lambda task: run(task, command))


def run(task: BenchTask, command: str) -> BenchRow:
    """Do one run."""
    with Hosts(task.world_size, rate_mbit=task.rate_mbit) as hosts:
        link_mbit = hosts.measure_mbit()
        with busy_cores() as machine_cores:
            measured = _measure(task, hosts)
    return BenchRow(
        settings=task,
        command=command,
        measured=measured,
        link_mbit=link_mbit,
        machine_cores=machine_cores[0],
        environment=environment(),
        commit=commit(),
    )


def start_clock(workers: Workers[Answer]) -> None:
    """Answer the ranks' ``Warm``."""
    with suppress(ProcessLookupError):  # if it has died, its rows end with the reason
        os.kill(workers.pids[0], signal.SIGUSR1)


def _measure(task: BenchTask, hosts: Hosts) -> tuple[Measured, ...]:
    measured: tuple[Measured, ...] = ()
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(PROGRAM, task, hosts, timeout_s=TIMEOUT_S))
        for answer in workers.rows():
            if isinstance(answer, Warm):
                stack.enter_context(competing(hosts, task.flows))
                start_clock(workers)
            elif isinstance(answer, Findings):
                measured = answer.measured
    return measured


@contextmanager
def busy_cores() -> Iterator[list[float]]:
    """Fill the list, at the block's end, with the processors that were busy meanwhile."""
    result: list[float] = []
    busy, total = _processor_ticks()
    yield result
    busy_then, total_then = _processor_ticks()
    share = (busy_then - busy) / max(1, total_then - total)
    result.append(share * (os.cpu_count() or 1))


def _processor_ticks() -> tuple[int, int]:
    """Return how long processors were busy, and in all, since the start of the machine."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]  # user nice system idle iowait irq softirq steal
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)
