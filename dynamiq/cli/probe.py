"""``dynamiq probe``: what links and formats cost on the ranks that will train."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dynamiq.core.errors import ConfigurationError, DynamiqError
from dynamiq.probe import hardware, torchrun
from dynamiq.probe.report import tables


def probe(
    output: Annotated[
        Path, typer.Option(help="The profile, which `dynamiq plan --profile` reads.")
    ] = Path("profile.json"),
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu (messages over Gloo) or cuda (NCCL). [default: cuda if there is one]",
            metavar="DEVICE",
        ),
    ] = None,
    link_seconds: Annotated[
        float, typer.Option(help="Begin no larger messages once those of a link took this long.")
    ] = 20.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds after which a silent rank is given up.")
    ] = 60.0,
) -> None:
    """Measure links, formats and processors on a real group of ranks, and write a profile.

    Start it as training is started, on the machines that will train:

        torchrun --nproc-per-node 4 --no-python dynamiq probe --output profile.json

    All ranks send at once, 1 KiB to 64 MiB, as far as rings and butterflies reach; then all do the
    work of every format at once. It takes a minute at most, on slow links longer. Nothing else
    should run meanwhile. `dynamiq.probe.timeline` notes in a training script when gradients are
    ready.
    """
    if not output.absolute().parent.is_dir():
        _refuse(f"--output {output}: there is no folder {output.absolute().parent}")
    try:
        place = torchrun.device_of_rank(device)
        with torchrun.joined(place, timeout) as transport, _bar() as progress:
            profile = hardware.probe(
                transport,
                place,
                link_budget_s=link_seconds,
                source="dynamiq probe",
                progress=progress,
            )
    except ConfigurationError as error:
        _refuse(str(error))
    except DynamiqError as error:
        typer.echo(f"error: {error}", err=True)  # of every rank: they know of different peers
        raise typer.Exit(1) from error
    if torchrun.is_first():
        Console().print(tables(profile))
        output.write_text(f"{profile.model_dump_json(indent=1)}\n", "utf-8")
        typer.echo(f"Written: {output}")


@contextmanager
def _bar() -> Iterator[hardware.Progress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console, hidden = Console(stderr=True), not torchrun.is_first()
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("probing", total=None)

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield show


def _refuse(reason: str) -> NoReturn:
    """End the command, which was used wrongly; all ranks know, and the first one says so."""
    if torchrun.is_first():
        typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(2)
