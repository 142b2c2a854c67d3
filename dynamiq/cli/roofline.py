"""``dynamiq roofline``: how near the kernels come to what a machine can do."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynamiq.core.errors import InputError, KernelError
from dynamiq.kernels.registry import ENTRY_FORMATS, WIDTHS, kernels_of
from dynamiq.roofline.machine import MACHINES
from dynamiq.roofline.measured import read
from dynamiq.roofline.predicted import predict
from dynamiq.roofline.report import tables
from dynamiq.roofline.row import Row


def roofline(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="JSON of pytest-benchmark, from tests/benchmarks/test_kernels.py.",
            metavar="[FILE]...",
            show_default=False,
        ),
    ] = None,
    predicted_for: Annotated[
        str | None,
        typer.Option(
            "--predict",
            help=f"Add bounds for a GPU that need not be here: {', '.join(MACHINES)}.",
            metavar="GPU",
        ),
    ] = None,
    entry_format: Annotated[
        list[str],
        typer.Option(
            "--format",
            help=f"Predict for entries in {', '.join(ENTRY_FORMATS)}; may be repeated.",
            metavar="FORMAT",
        ),
    ] = ["FP32"],  # noqa: B006  typer does not change it
    width: Annotated[
        list[int],
        typer.Option(
            help="Predict for codes of so many bits: 1 to 10, or 16; may be repeated.",
            metavar="BITS",
        ),
    ] = [2, 4, 8],  # noqa: B006
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """Show entries, bytes and instructions per second of the kernels, and what binds them.

    FILEs hold what was measured. Predictions need no GPU: kernels are compiled for it, their
    instructions are counted, and its datasheet says how quickly it moves bytes and starts
    instructions; the tighter bound counts.
    """
    if not files and predicted_for is None:
        raise typer.BadParameter("give a FILE of measurements, or --predict GPU, or both")
    _check("--predict", [predicted_for] if predicted_for else [], MACHINES)
    formats = [name.upper() for name in entry_format]
    _check("--format", formats, ENTRY_FORMATS)
    _check("--width", width, WIDTHS)
    try:
        rows = [row for path in files or [] for row in read(path)]
        if predicted_for:
            rows += _predicted(predicted_for, formats, width)
    except (InputError, KernelError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        Console().print(tables(rows))


def _predicted(name: str, formats: list[str], widths: list[int]) -> list[Row]:
    plan = [
        (spec.name, entry_format, width)
        for spec in kernels_of("supergroups")
        for entry_format in formats
        for width in (widths if spec.has_widths else [None])
    ]
    progress = track(plan, "compiling", console=Console(stderr=True), transient=True)
    return [predict(MACHINES[name], *case) for case in progress]


def _check(option: str, asked: list[str] | list[int], known: object) -> None:
    listed = list(known)  # type: ignore[call-overload]
    for value in asked:
        if value not in listed:
            raise typer.BadParameter(
                f"{value!r} is unknown; there are {', '.join(map(str, listed))}", param_hint=option
            )
