"""``scripts/bench predict``: what the planner says steps take, beside what they took."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from dynamiq import DynamiQCompressor, MXCompressor, Uncompressed, topology_registry
from dynamiq.core.compressor import Compressor
from evaluation.bench.collectives import TIMEOUT_S
from evaluation.bench.planned import PlannedFindings, PlannedRow, PlannedTask, read_findings
from evaluation.bench.records import Existing, Method, Ours
from evaluation.bench.runs import busy_cores
from evaluation.launch import PYTHON, Program, Workers
from evaluation.network import Hosts
from evaluation.report import environment
from evaluation.rows import commit, run_missing

PROGRAM = Program[PlannedFindings](
    (*PYTHON, "evaluation.bench.planned_worker"), read_findings, lambda _: True
)


def methods(bits: Sequence[float], topologies: Sequence[str]) -> tuple[Method, ...]:
    """Return no communication, Gloo's FP32, and ours: FP32, BF16, MXFP8 and DynamiQ."""
    formats: dict[str, Compressor] = {
        "FP32": Uncompressed("fp32"),
        "BF16": Uncompressed("bf16"),
        "MXFP8": MXCompressor(format="mxfp8_e4m3"),
        **{f"DynamiQ {b:g} bits": DynamiQCompressor(bit_budget=b) for b in bits},
    }
    ours = [
        Ours(name=name, compressor=made, topology=topology_registry.read({"kind": topology}))
        for topology in topologies
        for name, made in formats.items()
    ]
    return (Existing(name="none"), Existing(name="fp32"), *ours)


def rows(tasks: Sequence[PlannedTask], path: Path) -> Iterator[PlannedRow]:
    """Do the runs that a file lacks, adding each to it; yields them.

    Raises:
        NetworkError: hosts cannot be made.
        WorkerError: a rank failed.
    """
    command = f"scripts/bench {shlex.join(sys.argv[1:])}"
    return run_missing(tasks, path, PlannedRow, lambda task: _run(task, command))


def _run(task: PlannedTask, command: str) -> PlannedRow:
    with Hosts(task.world_size, rate_mbit=task.training.rate_mbit) as hosts:
        link_mbit = hosts.measure_mbit()
        workers = Workers(PROGRAM, task, hosts, timeout_s=TIMEOUT_S)
        with busy_cores() as machine_cores, workers:
            (found,) = workers.rows()
    return PlannedRow(
        settings=task,
        command=command,
        found=found,
        link_mbit=link_mbit,
        machine_cores=machine_cores[0],
        environment=environment(),
        commit=commit(),
    )
