"""``dynamiq probe``: what links and formats cost on the ranks that will train."""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dynamiq.core.errors import DynamiqError
from dynamiq.core.transport import Transport
from dynamiq.planner.hardware import HardwareProfile
from dynamiq.probe import probe as measure
from dynamiq.probe.report import tables
from dynamiq.transports import GlooTransport, NCCLTransport

_START = "torchrun --nproc-per-node 4 --no-python dynamiq probe"
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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
        float,
        typer.Option(help="Begin no larger messages once those of a link took this long."),
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
    place = _place(device, link_seconds, timeout, output)
    try:
        with _group(place, timeout) as transport, _bar() as progress:
            profile = measure(
                transport,
                place,
                link_budget_s=link_seconds,
                source="dynamiq probe",
                progress=progress,
            )
    except DynamiqError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if _is_first():
        _write(profile, output)


def _place(device: str | None, link_seconds: float, timeout: float, output: Path) -> torch.device:
    """Check what can be checked before ranks meet; return this rank's device."""
    missing = [name for name in _SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        _refuse(
            f"dynamiq probe runs on a group of ranks, and {missing[0]} is not set; start it with "
            f"torchrun: {_START}"
        )
    if int(os.environ["WORLD_SIZE"]) < 2:
        _refuse(f"a probe measures what ranks do together, and this group has one: {_START}")
    for option, seconds in (("--link-seconds", link_seconds), ("--timeout", timeout)):
        if not 0 < seconds <= 1e6:
            _refuse(f"{option} takes seconds, more than 0 and at most 1e6, not {seconds:g}")
    if not output.absolute().parent.is_dir():
        _refuse(f"--output {output}: there is no folder {output.absolute().parent}")
    has_gpu = torch.cuda.is_available()
    kind = device or ("cuda" if has_gpu else "cpu")
    if kind not in ("cpu", "cuda"):
        _refuse(f"--device is cpu or cuda, not {kind}")
    if kind == "cuda" and not has_gpu:
        _refuse("--device cuda: torch sees no CUDA device; check the driver, or use --device cpu")
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


@contextlib.contextmanager
def _group(place: torch.device, timeout: float) -> Iterator[Transport]:
    """Be in the group that torchrun describes."""
    on_gpu = place.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=timeout))
    kind = NCCLTransport if on_gpu else GlooTransport
    transport = kind(timeout_s=timeout)
    try:
        yield transport
    finally:
        transport.close()
        dist.destroy_process_group()


@contextlib.contextmanager
def _bar() -> Iterator["_Report"]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not _is_first()) as progress:
        yield _Report(progress)


class _Report:
    """Shows how far the probe is."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("probing", total=None)

    def __call__(self, done: int, total: int, what: str) -> None:
        self._progress.update(self._task, completed=done, total=total, description=what)


def _write(profile: HardwareProfile, output: Path) -> None:
    Console().print(tables(profile))
    output.write_text(f"{profile.model_dump_json(indent=1)}\n", "utf-8")
    typer.echo(f"Written: {output}")


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _refuse(reason: str) -> NoReturn:
    """End the command, which was used wrongly; all ranks find out, and the first one says so."""
    if _is_first():
        typer.echo(f"error: {reason}", err=True)
    raise typer.Exit(2)
