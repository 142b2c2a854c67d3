"""The command line of ``scripts/bench``."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from dynamiq import DynamiQCompressor, DynamiqError, topology_registry
from evaluation.bench import figure, report, runs, timeline, trace_figure, tracing, workloads
from evaluation.bench.arguments import build, check_output, complaint, networks, values
from evaluation.bench.page import write_page
from evaluation.bench.predict import predict, predict_page
from evaluation.bench.records import (
    AllReduceTask,
    BenchRow,
    BenchTask,
    Existing,
    Method,
    Ours,
    TraceTask,
    TrainingTask,
)
from evaluation.command import failures_in_words, first_line, refuse
from evaluation.rows import read_rows

_ROWS = "rows.jsonl"
# Rounds of an all-reduce: as many as these seconds hold, within bounds.
_ROUNDS_S = 20.0
_FEWEST_ROUNDS, _MOST_ROUNDS = 3, 30


SEVERAL = "several are separated by commas"
HostsOption = Annotated[str, typer.Option(help=f"Numbers of hosts; {SEVERAL}.")]
RatesOption = Annotated[str, typer.Option(help=f"Link rates in Mbit/s; {SEVERAL}.")]
FlowsOption = Annotated[
    str, typer.Option(help="Competing TCP connections from each host to the next.")
]
BitsOption = Annotated[str, typer.Option(help="DynamiQ's bits per entry.")]
TopologiesOption = Annotated[str, typer.Option(help="Of ours: ring, butterfly, direct.")]
SegmentsOption = Annotated[
    str, typer.Option(help="Parts that ours split each chunk into; auto: as the pipeline chooses.")
]
SeedOption = Annotated[int, typer.Option(help="Decides contents and rounding.")]
OutputOption = Annotated[Path, typer.Option(help="Folder for rows, pictures and traces.")]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Times all-reduces and training steps over slow links, ours beside torch's.",
)

app.command()(predict)
app.command("predict-page")(predict_page)


@app.command("all-reduce")
def all_reduce(  # noqa: PLR0913 - options
    hosts: HostsOption = "4",
    rates: RatesOption = "25,200,2000",
    sizes: Annotated[
        str, typer.Option(help="Sizes of the FP32 tensor, such as 4KiB or 64MiB.")
    ] = "4KiB,64KiB,1MiB,16MiB",
    flows: FlowsOption = "0",
    existing: Annotated[str, typer.Option(help="Of torch: fp32, bf16, fp16.")] = "fp32,bf16",
    bits: BitsOption = "5",
    topologies: TopologiesOption = "ring",
    segments: SegmentsOption = "auto",
    rounds: Annotated[
        int | None, typer.Option(help="How often; by default what fits 20 seconds, 3 to 30.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Also draw a call of each method of ours.")
    ] = False,
    seed: SeedOption = 0,
    output: OutputOption = Path("bench-results"),
) -> None:
    """Time all-reduces: every size, at every rate, on every number of hosts."""
    methods = _methods(existing, bits, topologies, segments)
    tasks = [
        build(
            AllReduceTask,
            world_size=n,
            rate_mbit=rate,
            flows=f,
            methods=methods,
            rounds=rounds or _rounds(n, rate, nbytes, len(methods)),
            seed=seed,
            tensor_bytes=nbytes,
        )
        for n, rate in networks(hosts, rates)
        for f in values("--flows", flows, int)
        for nbytes in values("--sizes", sizes, report.read_size)
    ]
    check_output(output)
    with failures_in_words():
        found = _run(tasks, output)
        _print(figure.draw_all_reduces, found, output / "all-reduce.png")
        if trace:
            for task in tasks:
                for method in task.methods:
                    if isinstance(method, Ours):
                        _trace(task, method, output)


@app.command()
def train(  # noqa: PLR0913 - options
    workload: Annotated[
        str, typer.Option(help=f"Of {', '.join(workloads.NAMES)}.")
    ] = "language_model",
    hosts: HostsOption = "4",
    rates: RatesOption = "200",
    flows: FlowsOption = "0",
    existing: Annotated[
        str, typer.Option(help="Of torch: fp32, bf16, fp16, powersgd; none: no communication.")
    ] = "none,fp32,bf16,fp16,powersgd",
    bits: BitsOption = "5",
    topologies: TopologiesOption = "ring",
    segments: SegmentsOption = "auto",
    bucket_mib: Annotated[
        float | None,
        typer.Option(help="Largest DDP bucket; by default DDP's own choice, 25 after one of 1."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each method has its turn.")] = 2,
    steps: Annotated[int, typer.Option(help="Timed steps of each turn.")] = 4,
    seed: SeedOption = 0,
    output: OutputOption = Path("bench-results"),
) -> None:
    """Time training steps with DDP."""
    names = values("--workload", workload, str)
    for name in names:
        if name not in workloads.NAMES:
            refuse(f"--workload {name}: there are {', '.join(workloads.NAMES)}")
        if reason := workloads.missing_packages(name):
            refuse(reason)
    methods = _methods(existing, bits, topologies, segments)
    tasks = [
        build(
            TrainingTask,
            world_size=n,
            rate_mbit=rate,
            flows=f,
            methods=methods,
            rounds=rounds,
            seed=seed,
            workload=name,
            bucket_mib=bucket_mib,
            steps=steps,
        )
        for name in names
        for n, rate in networks(hosts, rates)
        for f in values("--flows", flows, int)
    ]
    check_output(output)
    with failures_in_words():
        _print(figure.draw_steps, _run(tasks, output), output / "steps.png")


@app.command()
def page(
    rows: Annotated[Path, typer.Argument(help="File of rows.")],
    output: Annotated[Path, typer.Option(help="The page.")] = Path("docs/results/bench.md"),
) -> None:
    """Make the page from rows, with its pictures."""
    command = f"scripts/bench {shlex.join(sys.argv[1:])}"
    try:
        written = write_page(read_rows(rows, BenchRow), output, command)
    except (OSError, ValueError) as error:
        refuse(first_line(error))
    Console().print(f"Written: {', '.join(map(str, written))}", highlight=False)


def _methods(existing: str, bits: str, topologies: str, segments: str) -> tuple[Method, ...]:
    names = values("--existing", existing, str)
    try:
        ours = [
            Ours(
                name=f"DynamiQ {b:g} bits",
                compressor=DynamiQCompressor(bit_budget=b),
                topology=topology_registry.read({"kind": topology}),
                segments=s,
            )
            for topology in values("--topologies", topologies, str)
            for b in values("--bits", bits, float)
            for s in values("--segments", segments, _segments)
        ]
        return (*(Existing.model_validate({"name": name}) for name in names), *ours)
    except DynamiqError as error:
        refuse(first_line(error))
    except ValidationError as error:
        refuse(complaint(error))


def _segments(text: str) -> int | None:
    return None if text == "auto" else int(text)


def _rounds(hosts: int, rate_mbit: float, nbytes: int, methods: int) -> int:
    """Return how many rounds fit, the same for equal options: rows are told apart by it.

    Taking every method for BF16 with half its rate errs on the side of fewer.
    """
    per_round_s = methods * 2 * (hosts - 1) / hosts * nbytes * 8 / (rate_mbit * 1e6)
    return max(_FEWEST_ROUNDS, min(_MOST_ROUNDS, int(_ROUNDS_S / (per_round_s + 1e-3))))


def _run(tasks: Sequence[BenchTask], output: Path) -> list[BenchRow]:
    """Do what is missing; return the rows of all tasks."""
    console = Console()
    path = output / _ROWS
    command = f"scripts/bench {shlex.join(sys.argv[1:])}"
    for row in _shown(runs.rows(tasks, path, command), console):
        console.print(report.table(row))
    wanted = {task.model_dump_json() for task in tasks}
    found = [r for r in read_rows(path, BenchRow) if r.settings.model_dump_json() in wanted]
    console.print(f"{len(found)} runs in {path}", highlight=False)
    return found


def _shown(rows: Iterator[BenchRow], console: Console) -> Iterator[BenchRow]:
    """Show that something happens while a run takes its time."""
    while True:
        with console.status("measuring"):
            row = next(rows, None)
        if row is None:
            return
        yield row


def _print(
    draw: Callable[[Sequence[BenchRow], Path], None], rows: Sequence[BenchRow], path: Path
) -> None:
    draw(rows, path)
    Console().print(f"Written: {path}", highlight=False)


def _trace(task: AllReduceTask, method: Ours, output: Path) -> None:
    console = Console()
    with console.status("tracing"):
        traced = tracing.trace(
            TraceTask(
                world_size=task.world_size,
                rate_mbit=task.rate_mbit,
                flows=task.flows,
                method=method,
                tensor_bytes=task.tensor_bytes,
                seed=task.seed,
            )
        )
    words = (
        f"trace {method.label} {report.size(task.tensor_bytes)} {task.rate_mbit:g} Mbit "
        f"{task.world_size} hosts" + (f" {task.flows} flows" if task.flows else "")
    )
    stem = "-".join(words.replace(",", "").split())
    timeline.write_events(traced, output / f"{stem}.json")
    trace_figure.draw(traced, output / f"{stem}.png")
    for table in timeline.link_table(traced), timeline.spent_table(traced):
        console.print(table)
    console.print(f"Written: {output / stem}.json and .png", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    app(prog_name="scripts/bench")
