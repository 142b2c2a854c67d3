"""``scripts/bench predict``: what the planner says steps take, beside what they took."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynamiq import (
    Compressor,
    DynamiQCompressor,
    DynamiqError,
    MXCompressor,
    Uncompressed,
    topology_registry,
)
from evaluation.bench import workloads
from evaluation.bench.arguments import build, check_output, networks, values
from evaluation.bench.collectives import TIMEOUT_S
from evaluation.bench.planned import PlannedFindings, PlannedRow, PlannedTask, read_findings
from evaluation.bench.predictions import table, write_page
from evaluation.bench.records import Existing, Method, Ours, TrainingTask
from evaluation.bench.runs import busy_cores
from evaluation.command import failures_in_words, first_line, refuse
from evaluation.launch import PYTHON, Program, Workers
from evaluation.network import Hosts
from evaluation.report import environment
from evaluation.rows import commit, read_rows, run_missing

PROGRAM = Program[PlannedFindings](
    (*PYTHON, "evaluation.bench.planned_worker"), read_findings, lambda _: True
)


_ROWS = "planner.jsonl"


def predict(  # noqa: PLR0913 - options
    hosts: Annotated[str, typer.Option(help="Numbers of hosts, separated by commas.")] = "4",
    rates: Annotated[
        str, typer.Option(help="Link rates in Mbit/s, separated by commas.")
    ] = "100,200,500,1000",
    workload: Annotated[
        str, typer.Option(help=f"One of {', '.join(workloads.NAMES)}.")
    ] = "language_model",
    bits: Annotated[str, typer.Option(help="DynamiQ's bits per entry.")] = "3,4,5,6",
    topologies: Annotated[str, typer.Option(help="ring, butterfly, direct.")] = "ring,butterfly",
    rounds: Annotated[int, typer.Option(help="How often each method has its turn.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps of each turn.")] = 3,
    seed: Annotated[int, typer.Option(help="Decides contents and rounding.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for rows.")] = Path("bench-results"),
) -> None:
    """Hold the planner's step times against measured ones.

    On each network the ranks are probed, note when gradients are ready, and train with FP32, BF16,
    MXFP8 and DynamiQ on every topology.
    """
    if workload not in workloads.NAMES:
        refuse(f"--workload {workload}: there are {', '.join(workloads.NAMES)}")
    if reason := workloads.missing_packages(workload):
        refuse(reason)
    try:
        wanted = methods(values("--bits", bits, float), values("--topologies", topologies, str))
    except DynamiqError as error:
        refuse(first_line(error))
    tasks = [
        PlannedTask(
            world_size=n,
            training=build(
                TrainingTask,
                world_size=n,
                rate_mbit=rate,
                methods=wanted,
                rounds=rounds,
                seed=seed,
                workload=workload,
                steps=steps,
            ),
        )
        for n, rate in networks(hosts, rates)
    ]
    check_output(output)
    console, path = Console(), output / _ROWS
    with failures_in_words():
        made = rows(tasks, path)
        while True:
            with console.status("measuring"):
                row = next(made, None)
            if row is None:
                break
            console.print(table(row))
    console.print(f"{len(read_rows(path, PlannedRow))} runs in {path}", highlight=False)


def predict_page(
    rows: Annotated[Path, typer.Argument(help="File of rows.")],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("docs/results/planner.md"),
) -> None:
    """Make the page of the planner's predictions from rows."""
    command = f"scripts/bench {shlex.join(sys.argv[1:])}"
    try:
        write_page(read_rows(rows, PlannedRow), output, command)
    except (OSError, ValueError, DynamiqError) as error:
        refuse(first_line(error))
    Console().print(f"Written: {output}", highlight=False)


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
