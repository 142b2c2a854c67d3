"""``dynamiq kernels``: what the kernels cost on an architecture, read from their machine code."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dynamiq.core.errors import KernelError
from dynamiq.kernels.architecture import Architecture, Target
from dynamiq.kernels.cubin import read_resources
from dynamiq.kernels.nvrtc import compile_kernel
from dynamiq.kernels.registry import (
    ARCHITECTURES,
    ENTRY_FORMATS,
    KERNELS,
    WIDTHS,
    KernelSpec,
    find_architecture,
    find_kernel,
)
from dynamiq.kernels.sass import disassemble

T = TypeVar("T")
Found = TypeVar("Found")


def kernels(
    kernel: Annotated[
        list[str],
        typer.Option(help=f"One of {', '.join(KERNELS)}; may be repeated.", metavar="NAME"),
    ] = list(KERNELS),  # noqa: B006  typer does not change it
    entry_format: Annotated[
        list[str],
        typer.Option(
            "--format",
            help=f"How entries are stored: {', '.join(ENTRY_FORMATS)}; may be repeated. "
            "Kernels that have no such format are left out.",
            metavar="FORMAT",
        ),
    ] = ["FP32"],  # noqa: B006
    width: Annotated[
        list[int],
        typer.Option(
            help="Specialise to codes of so many bits: 1 to 10, or 16; may be repeated.",
            metavar="BITS",
        ),
    ] = [2, 4, 8],  # noqa: B006
    architecture: Annotated[
        list[str],
        typer.Option(
            help=f"One of {', '.join(map(str, ARCHITECTURES))}; may be repeated.",
            metavar="NAME",
        ),
    ] = ["sm_90a", "sm_120a"],  # noqa: B006
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list, with counts by instruction class.")
    ] = False,
) -> None:
    """Show registers, memory and instructions of the GPU kernels. Needs no GPU.

    Each kernel is compiled with NVRTC. The build for "any" width is the one that runs: it takes
    the width as an argument and holds the code of all widths. Builds for one width are made for
    this report alone, so that their instructions can be counted.

    Instructions per entry are static: every instruction of the code counts once, both sides of a
    branch do, and the sum is divided by the 16 entries of a thread; – for kernels without entries.
    """
    plan = list(
        _builds(
            [_checked("kernel", find_kernel, name) for name in kernel],
            [_checked("format", _find_format, name) for name in entry_format],
            [_checked("width", _find_width, bits) for bits in width],
            [_checked("architecture", find_architecture, name) for name in architecture],
        )
    )
    if not plan:
        raise typer.BadParameter(
            f"{', '.join(kernel)}: not written for entries in {', '.join(entry_format)}",
            param_hint="--format",
        )
    try:
        progress = track(plan, "compiling", console=Console(stderr=True), transient=True)
        reports = [measure(build) for build in progress]
    except KernelError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps([asdict(report) for report in reports], indent=2))
        return
    console = Console()
    for name, rows in groupby(reports, key=lambda report: report.kernel):
        console.print(_table(name, list(rows)), "")
    console.print(
        "Sizes in bytes, for one thread, but shared memory for a block. Verified on: the GPU on "
        "which the kernel gave the reference's bits; – is compiled only."
    )


@dataclass(frozen=True)
class Build:
    """What to compile: a kernel, and what it is specialised to."""

    spec: KernelSpec
    entry_format: str | None
    width: int | None
    architecture: Architecture


@dataclass(frozen=True)
class Report:
    """What one build costs; all of it is static, read from the machine code.

    ``width`` is None for the build that runs. See :mod:`dynamiq.kernels.cubin` and
    :mod:`dynamiq.kernels.sass` for what the numbers mean.
    """

    kernel: str
    format: str | None
    width: int | None
    architecture: str
    registers: int
    spill_stores_bytes: int
    spill_loads_bytes: int
    local_bytes: int
    shared_bytes: int
    instructions: int
    instructions_by_class: dict[str, int]
    instructions_per_entry: float | None
    widest_load_bytes: int
    verified_on: str | None


def measure(build: Build) -> Report:
    """Compile a kernel and read what it costs.

    Raises:
        KernelError: It cannot be compiled, or its machine code cannot be read.
    """
    spec, target = build.spec, Target(build.architecture)
    compiled = compile_kernel(spec, build.entry_format, target, only_width=build.width)
    resources = read_resources(compiled.code, spec.name)
    listing = disassemble(compiled.code, spec.name)
    return Report(
        kernel=spec.name,
        format=build.entry_format,
        width=build.width,
        architecture=str(build.architecture),
        registers=resources.registers,
        spill_stores_bytes=listing.spill_stores_bytes,
        spill_loads_bytes=listing.spill_loads_bytes,
        local_bytes=resources.local_bytes,
        shared_bytes=resources.shared_bytes,
        instructions=len(listing.instructions),
        instructions_by_class=listing.count_by_class(),
        instructions_per_entry=listing.per_entry if build.entry_format else None,
        widest_load_bytes=listing.widest_load_bytes,
        verified_on=spec.verified_on.get(build.architecture),
    )


def _builds(
    specs: list[KernelSpec],
    entry_formats: list[str],
    widths: list[int],
    architectures: list[Architecture],
) -> Iterator[Build]:
    for spec in specs:
        for entry_format in spec.formats_among(entry_formats):
            for width in (None, *widths) if spec.has_widths else (None,):
                for architecture in architectures:
                    yield Build(spec, entry_format, width, architecture)


def _table(kernel: str, reports: list[Report]) -> Table:
    """Return a table that fits into 80 columns."""
    table = Table(title=kernel, title_justify="left", box=None, pad_edge=False)
    table.padding = (0, 2, 0, 0)
    for column in ("format", "width", "GPU\narch."):
        table.add_column(column)
    for column in ("regis-\nters", "spills", "local", "shared", "instr./\nentry", "widest\nload"):
        table.add_column(column, justify="right")
    table.add_column("verified\non")
    run_time_width = "any" if KERNELS[kernel].has_widths else "–"
    for report in reports:
        table.add_row(
            report.format or "–",
            run_time_width if report.width is None else str(report.width),
            report.architecture,
            str(report.registers),
            str(report.spill_stores_bytes + report.spill_loads_bytes),
            str(report.local_bytes),
            str(report.shared_bytes),
            "–"
            if report.instructions_per_entry is None
            else f"{report.instructions_per_entry:.1f}",
            str(report.widest_load_bytes),
            report.verified_on or "–",
        )
    return table


def _checked(option: str, find: Callable[[T], Found], value: T) -> Found:
    try:
        return find(value)
    except KernelError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{option}") from error


def _find_format(name: str) -> str:
    if name.upper() not in ENTRY_FORMATS:
        raise KernelError(f"no format is named {name!r}; there are {', '.join(ENTRY_FORMATS)}")
    return name.upper()


def _find_width(bits: int) -> int:
    if bits not in WIDTHS:
        raise KernelError(f"no code has {bits} bits; there are {', '.join(map(str, WIDTHS))}")
    return bits
