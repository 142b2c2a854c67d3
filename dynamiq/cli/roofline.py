"""``dynamiq roofline``: how near the kernels come to what a machine can do."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynamiq.core.errors import InputError, KernelError
from dynamiq.kernels.registry import ENTRY_FORMATS, WIDTHS
from dynamiq.roofline.case import Case
from dynamiq.roofline.families import FAMILIES
from dynamiq.roofline.machine import MACHINES, Machine
from dynamiq.roofline.measured import read
from dynamiq.roofline.predicted import predict
from dynamiq.roofline.report import tables
from dynamiq.roofline.row import Row

_WIDTHS = [2, 4, 8]


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
    family: Annotated[
        list[str],
        typer.Option(
            help=f"Predict for these kernels: {', '.join(FAMILIES)}; may be repeated. Rows of mx "
            "are by element format, those of hadamard for THC with 4 bits on four ranks. The "
            "family allocation has no rows: how much its kernel moves depends on the bucket.",
            metavar="FAMILY",
        ),
    ] = list(FAMILIES),  # noqa: B006  typer does not change it
    entry_format: Annotated[
        list[str],
        typer.Option(
            "--format",
            help=f"Predict for entries in {', '.join(ENTRY_FORMATS)}; may be repeated. "
            "Kernels that have no such format are left out.",
            metavar="FORMAT",
        ),
    ] = ["FP32"],  # noqa: B006
    width: Annotated[
        list[int] | None,
        typer.Option(
            help="Predict for codes of so many bits, in the family supergroups: 1 to 10, or 16; "
            "may be repeated.",
            metavar="BITS",
            show_default=", ".join(map(str, _WIDTHS)),
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
) -> None:
    """Show entries, bytes and instructions per second of the kernels, and what binds them.

    FILEs hold what was measured. Predictions need no GPU: kernels are compiled for it, their
    instructions are counted, and its datasheet says how quickly it moves bytes and starts
    instructions; the tighter bound counts.
    """
    if not files and predicted_for is None:
        raise typer.BadParameter("give a FILE of measurements, or --predict GPU, or both")
    machine = _machine(predicted_for) if predicted_for else None
    formats = [name.upper() for name in entry_format]
    _check("--family", family, FAMILIES)
    _check("--format", formats, ENTRY_FORMATS)
    _check("--width", width or [], WIDTHS)
    if width and "supergroups" not in family:
        raise typer.BadParameter(
            f"kernels of {', '.join(family)} are not built for a width; add --family supergroups, "
            f"or leave --width out",
            param_hint="--width",
        )
    plan = [case for name in family for case in FAMILIES[name].cases(formats, width or _WIDTHS)]
    if machine and not plan:
        raise typer.BadParameter(
            f"no kernel of {', '.join(family)} is written for entries in {', '.join(formats)}",
            param_hint="--format",
        )
    try:
        rows = [row for path in files or [] for row in read(path)]
        if machine:
            rows += _predicted(machine, plan)
    except (InputError, KernelError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        Console().print(tables(rows))


def _predicted(machine: Machine, plan: list[Case]) -> list[Row]:
    progress = track(plan, "compiling", console=Console(stderr=True), transient=True)
    return [predict(machine, case) for case in progress]


def _machine(name: str) -> Machine:
    """Return a GPU by its name, in capitals or not."""
    by_name = {known.upper(): machine for known, machine in MACHINES.items()}
    if name.upper() not in by_name:
        _check("--predict", [name], MACHINES)
    return by_name[name.upper()]


def _check(option: str, asked: list[str] | list[int], known: object) -> None:
    listed = list(known)  # type: ignore[call-overload]
    for value in asked:
        if value not in listed:
            raise typer.BadParameter(
                f"{value!r} is unknown; there are {', '.join(map(str, listed))}", param_hint=option
            )
