"""The demo: one small language model trained twice over a slow network.

Four worker processes, each on a host of its own, train with PyTorch DDP over Gloo. First their
gradients are all-reduced as BF16, then compressed by DynamiQ; everything else is the same. Ends
with a table, one sentence, ``results.json`` and ``loss_vs_time.png``.
"""

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from dynamiq import Butterfly, DynamiQCompressor, Uncompressed
from dynamiq.core.errors import ConfigurationError
from evaluation import figure, report
from evaluation.command import check_folder, failures_in_words, first_line, refuse
from evaluation.language_model import PARAMETERS
from evaluation.launch import TRAINING, Workers
from evaluation.network import Hosts, Loopback, Network, available
from evaluation.records import FinalRow, Link, Plan, Results, Run, StepRow
from evaluation.reviews import load_tokens, missing_packages

_QUICK_TRAINING_S = 100
_TRAINING_S = 480
_MAX_STEPS = 400
# What one step costs four ranks on two cores besides the wire, for choosing the number of steps.
_COMPUTE_S = 1.2
_CODEC_S = 2.2

app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def demo(
    rate: Annotated[float, typer.Option(help="Rate of every link, in Mbit/s.")] = 25,
    steps: Annotated[
        int | None, typer.Option(help="Training steps; by default as many as fit the time.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="3 minutes in all, not 10.")] = False,
    bits: Annotated[float, typer.Option(help="DynamiQ's bits per entry, metadata included.")] = 4,
    seed: Annotated[int, typer.Option(help="Decides weights, batches and rounding.")] = 0,
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo-results"),
) -> None:
    """Check everything that can be wrong, then compares two runs."""
    console = Console()
    steps = _default_steps(rate, bits, quick) if steps is None else steps
    plans = _plans(steps, bits, seed)
    _check(rate, output)
    command = f"scripts/demo --rate {rate:g} --steps {steps} --bits {bits:g} --seed {seed}"
    command += f" --output {shlex.quote(str(output))}"
    with failures_in_words():
        results = _compare(plans, rate, command, console)
        _show(results, output, console)


def _plans(steps: int, bits: float, seed: int) -> tuple[Plan, Plan]:
    if steps < 1:
        refuse(f"--steps must be at least 1, not {steps}")
    if not 0 <= seed < 1 << 63:
        refuse(f"--seed must be 0 to 2⁶³ - 1, not {seed}")
    try:
        compressor = DynamiQCompressor(bit_budget=bits)
    except (ConfigurationError, ValidationError) as error:
        refuse(f"--bits {bits:g}: {first_line(error)}")
    reference = Plan(
        label="BF16",
        compressor=Uncompressed("bf16"),
        topology=Butterfly(),
        steps=steps,
        seed=seed,
    )
    changes = {"label": f"DynamiQ {bits:g} bits", "compressor": compressor}
    return reference, reference.model_copy(update=changes)


def _check(rate: float, output: Path) -> None:
    """Refuse what could only fail after minutes of training."""
    try:
        Hosts(2, rate_mbit=rate)
    except ValueError as error:
        refuse(f"--rate {rate:g}: {error}")
    if reason := missing_packages():
        refuse(reason)
    check_folder("--output", output)


def _default_steps(rate: float, bits: float, quick: bool) -> int:
    """Return how many steps fit the time at this rate: a butterfly of 4 sends 1.5 times d."""
    sent_bits = 1.5 * PARAMETERS * (16 + bits)
    wire_s = sent_bits / (rate * 1e6) if rate > 0 and available() else 0.2
    fitting = (_QUICK_TRAINING_S if quick else _TRAINING_S) / (wire_s + 2 * _COMPUTE_S + _CODEC_S)
    return max(3, min(_MAX_STEPS, int(fitting))) if math.isfinite(fitting) else 3


def _compare(plans: tuple[Plan, Plan], rate: float, command: str, console: Console) -> Results:
    with console.status("preparing the text (some seconds, once)"):
        load_tokens()
    with _network(plans[0].world_size, rate, console) as (network, link):
        # A step of BF16 at this rate, several times over: slow is not dead.
        timeout_s = 120 + 5 * 1.5 * PARAMETERS * 32 / (rate * 1e6)
        with _progress(console) as progress:
            reference, compressed = (_train(plan, network, timeout_s, progress) for plan in plans)
    return Results(
        command=command,
        environment=report.environment(),
        link=link,
        runs=(reference, compressed),
        sentence=report.sentence(reference, compressed, link),
    )


@contextmanager
def _network(world_size: int, rate: float, console: Console) -> Iterator[tuple[Network, Link]]:
    possible = available()
    if not possible:
        console.print(
            f"[yellow]No slow network here: {possible.reason}.[/]\n"
            "Training over loopback instead: bytes and losses are real, but the comparison of "
            "times means nothing."
        )
        yield Loopback(), Link(kind="loopback", why_loopback=possible.reason)
        return
    with Hosts(world_size, rate_mbit=rate) as hosts:
        measured = hosts.measure_mbit()
        console.print(
            f"{world_size} hosts made, each with a link of {rate:g} Mbit/s "
            f"({measured:.1f} measured)."
        )
        yield hosts, Link(kind="namespaces", rate_mbit=rate, measured_mbit=measured)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,  # a log gets plain lines instead
    )


def _train(plan: Plan, network: Network, timeout_s: float, progress: Progress) -> Run:
    network.set_limited(True)
    task = progress.add_task(plan.label, total=plan.steps, state="starting")
    rows: list[StepRow] = []
    final: FinalRow | None = None
    with Workers(TRAINING, plan, network, timeout_s=timeout_s) as workers:
        for row in workers.rows():
            if isinstance(row, FinalRow):
                final = row
            else:
                rows.append(row)
            _show_progress(progress, task, plan, rows, final)
            if len(rows) == plan.steps:
                # The clock has stopped: what follows compares with exact sums.
                network.set_limited(False)
    assert final is not None
    return Run(plan=plan, rows=tuple(rows), final=final)


def _show_progress(
    progress: Progress, task: TaskID, plan: Plan, rows: list[StepRow], final: FinalRow | None
) -> None:
    last, console = rows[-1], progress.console
    sent_mb = sum(row.bytes_sent for row in rows) / 1e6
    state = f"loss {last.loss:.3f}  {sent_mb:.0f} MB"
    validating = "  validating" if len(rows) == plan.steps and final is None else ""
    progress.update(task, completed=len(rows), state=state + validating)
    if not console.is_terminal and final is None and last.step % max(1, plan.steps // 10) == 0:
        console.print(
            f"{plan.label}: step {last.step + 1}/{plan.steps}  {state}  {last.elapsed_s:.0f} s",
            highlight=False,
        )


def _show(results: Results, output: Path, console: Console) -> None:
    console.print(report.table(*results.runs))
    console.print(results.sentence, highlight=False)
    written = [
        report.write_results(results, output),
        figure.draw_loss_vs_time(*results.runs, results.link, output),
    ]
    console.print(f"Written: {', '.join(map(str, written))}", highlight=False)


if __name__ == "__main__":
    app(prog_name="scripts/demo")
