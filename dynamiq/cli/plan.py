"""``dynamiq plan``: what to use on a cluster, for a training, or whether to compress at all."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from dynamiq.core.errors import DynamiqError, InputError
from dynamiq.planner import files, plot, report, units
from dynamiq.planner import plan as plans
from dynamiq.planner.profiles import presets
from dynamiq.planner.profiles.hardware import HardwareProfile, Link
from dynamiq.planner.profiles.spectrum import GradientSpectrum
from dynamiq.planner.profiles.typical import SPECTRUM, evenly_ready
from dynamiq.planner.profiles.workload import WorkloadProfile
from dynamiq.planner.search import MAX_VNMSE, Objective, Search

V = TypeVar("V", HardwareProfile, WorkloadProfile)

_BACKWARD_SHARE = 2 / 3
"""Of a step, if nobody says: twice a forward pass (Kaplan et al. 2020, §2.1)."""


def plan(  # noqa: PLR0913  a command line has as many parameters as options
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Hardware as dynamiq probe has measured it; instead of the flags of a cluster.",
            metavar="FILE.json",
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="Training as dynamiq probe has measured it; instead of the flags of a training.",
            metavar="FILE.json",
        ),
    ] = None,
    world_size: Annotated[
        str | None, typer.Option(help="GPUs, one rank each.", metavar="N")
    ] = None,
    ranks_per_node: Annotated[
        str, typer.Option(help="Of them, on one machine, which share its network.", metavar="N")
    ] = "1",
    network: Annotated[
        str | None,
        typer.Option(
            help=f"Between machines, instead of the next two: {', '.join(presets.NETWORKS)}.",
            metavar="NAME",
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            help="Of a machine's network, each way, such as 25Gbit/s or 3.1GB/s.", metavar="RATE"
        ),
    ] = None,
    latency: Annotated[
        str, typer.Option(help="Of a small message, such as 20us.", metavar="TIME")
    ] = "20us",
    node: Annotated[
        str,
        typer.Option(help=f"Inside a machine: {', '.join(presets.NODES)}.", metavar="NAME"),
    ] = "nvlink-a100",
    gpu: Annotated[str, typer.Option(help=f"{', '.join(presets.GPUS)}.", metavar="NAME")] = "A100",
    parameters: Annotated[
        str | None, typer.Option(help="Such as 350M or 1.2B.", metavar="COUNT")
    ] = None,
    backward: Annotated[
        str | None,
        typer.Option(help="A backward pass without communication, as 250ms.", metavar="TIME"),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="A whole step without communication. [default: 3/2 of the backward pass]",
            metavar="TIME",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of gradients: float32, bfloat16 or float16.", metavar="NAME")
    ] = "float32",
    max_error: Annotated[
        str, typer.Option(help="The greatest vNMSE of the sum.", metavar="ERROR")
    ] = str(MAX_VNMSE),
    max_step_time: Annotated[
        str | None,
        typer.Option(
            help="Look for the least error within this time, not for the fastest step.",
            metavar="TIME",
            show_default=False,
        ),
    ] = None,
    threshold: Annotated[
        str,
        typer.Option(help="What compression must save of a step to be worth it.", metavar="SHARE"),
    ] = "5%",
    pareto: Annotated[
        bool,
        typer.Option("--pareto", help="List what nothing beats in both time and error."),
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show the terms of a step's time.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan; dynamiq.planner.load reads it.")
    ] = False,
    draw: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            help="Also draw error against step time (needs the extra simulate).",
            metavar="FILE.svg|.png|.pdf",
        ),
    ] = None,
) -> None:
    """Choose compressor, topology, bits and bucket size, or advise against compressing.

    From measured files (dynamiq probe), or from flags that describe GPUs by their data sheets.
    """
    cluster = _Cluster(world_size, ranks_per_node, network, bandwidth, latency, node, gpu)
    training = _Training(parameters, backward, step, dtype)
    try:
        _check_picture(draw)
        objective = _objective(max_error, max_step_time, threshold)
        hardware = _read(profile, HardwareProfile) or cluster.profile()
        work = _read(workload, WorkloadProfile) or training.profile()
        found = _plan(hardware, work, objective, flags=profile is None)
        if draw is not None:
            plot.draw(found, draw)
    except DynamiqError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(files.dump(found), nl=False)
    else:
        Console().print(report.summary(found, explain=explain, front=pareto))


@dataclass(frozen=True)
class _Cluster:
    """The flags that describe hardware, as they were typed."""

    world_size: str | None
    ranks_per_node: str
    network: str | None
    bandwidth: str | None
    latency: str
    node: str
    gpu: str

    def profile(self) -> HardwareProfile:
        if self.world_size is None:
            raise InputError("a plan needs --world-size, or --profile FILE.json")
        if self.node not in presets.NODES:
            raise InputError(f"no link {self.node!r}; there are {', '.join(presets.NODES)}")
        ranks, places = units.count(self.world_size), units.count(self.ranks_per_node)
        link, source = self._network(needed=ranks > places)
        inside = presets.NODES[self.node]
        return presets.Cluster(
            ranks,
            places,
            link,
            inside.link if places > 1 else None,
            self.gpu,
            "; ".join([source, inside.source] if places > 1 else [source]),
        ).profile()

    def _network(self, *, needed: bool) -> tuple[Link | None, str]:
        if self.network is not None and self.bandwidth is not None:
            raise InputError("--network and --bandwidth describe the same link; give one of them")
        if self.network is not None:
            if self.network not in presets.NETWORKS:
                names = ", ".join(presets.NETWORKS)
                raise InputError(f"no network {self.network!r}; there are {names}")
            known = presets.NETWORKS[self.network]
            return known.link, known.source
        if self.bandwidth is None:
            if needed:
                raise InputError("a plan needs --bandwidth or --network, or --profile FILE.json")
            return None, "no network"
        rate, delay = units.bandwidth(self.bandwidth), units.latency(self.latency)
        return Link(latency_s=delay, bandwidth_bytes_per_s=rate), "flags of the command line"


@dataclass(frozen=True)
class _Training:
    """The flags that describe a training, as they were typed."""

    parameters: str | None
    backward: str | None
    step: str | None
    dtype: str

    def profile(self) -> WorkloadProfile:
        if self.parameters is None or self.backward is None:
            raise InputError("a plan needs --parameters and --backward, or --workload FILE.json")
        backward_s = units.duration(self.backward)
        step_s = backward_s / _BACKWARD_SHARE if self.step is None else units.duration(self.step)
        if step_s < backward_s:
            raise InputError(
                f"a step of {self.step} cannot hold a backward pass of {self.backward}"
            )
        return evenly_ready(units.count(self.parameters), backward_s, step_s, self.dtype)


def _read(path: Path | None, kind: type[V]) -> V | None:
    return None if path is None else files.read(path, kind)


def _objective(max_error: str, max_step_time: str | None, threshold: str) -> Objective:
    return Objective(
        goal="fastest" if max_step_time is None else "least_error",
        max_vnmse=units.error(max_error),
        max_step_s=None if max_step_time is None else units.duration(max_step_time),
        threshold=units.share(threshold),
    )


def _plan(
    hardware: HardwareProfile, work: WorkloadProfile, objective: Objective, *, flags: bool
) -> plans.Plan:
    assumptions = []
    spectrum: GradientSpectrum = work.spectrum or SPECTRUM
    if work.spectrum is None:
        assumptions.append(
            "errors are those of the gradients of a small language model, for this training's "
            "have not been measured"
        )
    if flags:
        assumptions.append(
            "links reach the rate given, and kernels the memory's; dynamiq probe measures both"
        )
    return plans.make(Search(hardware, work, spectrum), objective, assumptions)


def _check_picture(path: Path | None) -> None:
    if path is not None and path.suffix not in plot.SUFFIXES:
        raise InputError(f"a plot is written as {', '.join(plot.SUFFIXES)}, got {path.name!r}")
    if path is not None and not path.parent.is_dir():
        raise InputError(f"there is no folder {path.parent} to write {path.name} into")
