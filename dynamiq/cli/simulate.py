"""``dynamiq simulate``: what formats do to gradients that one has."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from dynamiq.core.errors import ConfigurationError, DynamiqError
from dynamiq.core.registry import topology_registry
from dynamiq.core.topology import Topology
from dynamiq.simulation import ablation as steps
from dynamiq.simulation import plot as picture
from dynamiq.simulation import report
from dynamiq.simulation.formats import FORMATS, build, parse_option
from dynamiq.simulation.limit import rate_distortion_limit
from dynamiq.simulation.measurement import Case, Effort, measure
from dynamiq.simulation.request import Request
from dynamiq.simulation.row import Row
from dynamiq.simulation.sources import MIXTURE
from dynamiq.topologies import Hierarchical

_COMPRESSORS = ["bf16", "paper-stochastic", "paper", "default"]
_TOPOLOGIES = ["ring", "butterfly"]
_BITS = [5.0]
_SWEEP = [3.0 + 0.5 * i for i in range(11)]


def simulate(  # noqa: PLR0913  a command line has as many parameters as options
    gradients: Annotated[
        str,
        typer.Argument(
            help=f".safetensors or .pt with a tensor [ranks, ...], or {MIXTURE}.",
            show_default=False,
        ),
    ],
    compressor: Annotated[
        list[str] | None,
        typer.Option(
            help=f"One of {', '.join(FORMATS)}; may be repeated. "
            f"[default: {', '.join(_COMPRESSORS)}]",
            metavar="NAME",
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="Set a field of every --compressor that is named, such as widths=2,4,8 of paper; "
            "may be repeated.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    topology: Annotated[
        list[str],
        typer.Option(
            help="ring, butterfly, direct, hierarchical, or an installed one; may be repeated.",
            metavar="NAME",
        ),
    ] = _TOPOLOGIES,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(
            help="Of --topology hierarchical: rings inside nodes, in FP32, and between them. Bits "
            "are those sent between nodes.",
            metavar="N",
            show_default=False,
        ),
    ] = None,
    world_size: Annotated[
        int | None,
        typer.Option(
            help="Ranks: the first ones of a file, any number with --resample. "
            "[default: all of a file; 8]",
            metavar="N",
        ),
    ] = None,
    bits: Annotated[
        list[float] | None,
        typer.Option(
            help="Bit budget per entry, metadata included; may be repeated. "
            "[default: 5; --ablation: 4; --sweep: 3 to 8 in halves]",
            metavar="BITS",
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Calls to average over.")] = 5,
    orders: Annotated[
        int,
        typer.Option(
            min=1, help="Orders of the ranks to average over, since neighbours on a ring matter."
        ),
    ] = 1,
    warm_up: Annotated[
        int,
        typer.Option(
            min=0,
            help="Calls before each measured one, for formats that learn; omnireduce-topk settles "
            "in about 20.",
        ),
    ] = 2,
    hops: Annotated[bool, typer.Option(help="Also measure what every hop adds.")] = True,
    tensor: Annotated[
        str | None, typer.Option(help="Name of the tensor in the file.", metavar="NAME")
    ] = None,
    entries: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Entries of a rank, or of the one chunk. [default: all of a file; 1048576]",
            metavar="D",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of gradients that are drawn.")] = 0,
    resample: Annotated[
        bool,
        typer.Option(
            "--resample",
            help="Draw the ranks: Gaussian, with the file's energies and correlation of ranks.",
        ),
    ] = False,
    one_chunk: Annotated[
        bool,
        typer.Option(
            "--one-chunk",
            help="Run one chunk's messages and draw entries as they are needed, for world sizes "
            "that fit in no memory; formats that learn have then seen one call at most.",
        ),
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="What every idea of DynamiQ brings, one by one.")
    ] = False,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Error against bits, and the rate-distortion limit.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="With --sweep: also draw it (needs the extra simulate).",
            metavar="FILE.svg|.png|.pdf",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all rows as JSON.")] = False,
) -> None:
    """Show error, bias and bits of compressors on GRADIENTS, all-reduced in this process.

    The simulation runs the code of a real call, all ranks in one thread, and measures the sum that
    they end with. Several seeds round the same gradients.
    """
    _check_modes(ablation, sweep, plot, chosen=bool(compressor or option))
    if one_chunk and orders > 1:
        raise typer.BadParameter("--orders permutes given ranks; --one-chunk draws them all alike")
    budgets = bits or (_SWEEP if sweep else [steps.BITS] if ablation else _BITS)
    try:
        topologies = [_topology(name, ranks_per_node) for name in topology]
        if ablation:
            cases = _ablation_cases(topologies, budgets)
        else:
            cases = _cases(compressor or _COMPRESSORS, option or [], topologies, budgets)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error)) from error
    request = Request(gradients, tensor, world_size, entries, seed, resample, one_chunk)
    effort = Effort(seeds, warm_up, hops and not (ablation or sweep), orders)
    try:
        world = request.world()
        progress = track(cases, "simulating", console=Console(stderr=True), transient=True)
        rows = [measure(world, case, effort) for case in progress]
        limit = dict(zip(budgets, rate_distortion_limit(world.target.total, budgets), strict=True))
        if plot is not None:
            picture.draw(rows, limit, plot)
    except DynamiqError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(_json(gradients, rows, limit))
    elif sweep:
        Console().print(report.sweep(rows, limit))
    else:
        Console().print(report.ablation(rows) if ablation else report.summary(rows))


def _check_modes(ablation: bool, sweep: bool, plot: Path | None, *, chosen: bool) -> None:
    if ablation and sweep:
        raise typer.BadParameter("--ablation and --sweep are two reports; ask for one")
    if ablation and chosen:
        raise typer.BadParameter("--ablation has its own compressors; leave out --compressor")
    if plot is not None and not sweep:
        raise typer.BadParameter("--plot draws a --sweep")
    if plot is not None and plot.suffix not in picture.SUFFIXES:
        raise typer.BadParameter(
            f"a plot is written as {', '.join(picture.SUFFIXES)}, got {plot.name!r}"
        )
    if plot is not None and not plot.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {plot.parent} to write {plot.name} into")


def _topology(name: str, ranks_per_node: int | None) -> Topology:
    if name != "hierarchical":
        return topology_registry.get(name)(kind=name)
    if ranks_per_node is None:
        raise ConfigurationError("--topology hierarchical needs --ranks-per-node")
    return Hierarchical(ranks_per_node=ranks_per_node)


def _cases(
    names: list[str], options: list[str], topologies: list[Topology], budgets: list[float]
) -> list[Case]:
    changes = dict(parse_option(text) for text in options)
    cases = []
    for name in names:
        has_budget = name not in FORMATS or FORMATS[name].has_budget
        for topology in topologies:
            for budget in budgets if has_budget else budgets[:1]:
                made = build(name, budget, changes)
                cases.append(Case(name, made, topology, budget if has_budget else None))
    return cases


def _ablation_cases(topologies: list[Topology], budgets: list[float]) -> list[Case]:
    if len(budgets) != 1:
        raise ConfigurationError(f"--ablation takes one budget, got {len(budgets)}")
    return [
        Case(name, compressor, topology, budgets[0])
        for topology in topologies
        for name, compressor in steps.steps(budgets[0]).items()
    ]


def _json(gradients: str, rows: list[Row], limit: dict[float, float]) -> str:
    points = [{"bits": bits, "vnmse": least} for bits, least in limit.items()]
    document = {
        "gradients": gradients,
        "rows": [row.as_dict() for row in rows],
        "rate_distortion_limit": points,
    }
    return json.dumps(document, indent=2)
