"""How near the planner's predicted errors are to measured ones.

python -m evaluation.predicted_errors GRADIENTS --rows ROWS
python -m evaluation.predicted_errors GRADIENTS --rows ROWS --show

On the gradients themselves, a row is the mean over orders of the ranks, each with a seed of its
own; fewer ranks than the file holds are a random choice of them. For more, ranks are drawn with the
energies and the correlation of the file (``dynamiq simulate --resample``), anew for each order.
Predictions follow from the spectrum of the ranks that are reduced; for drawn ones, of eight others,
drawn likewise. Nothing else enters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated

import torch
import typer
from torch import Tensor

from dynamiq import (
    Butterfly,
    Compressor,
    Direct,
    DynamiQCompressor,
    Hierarchical,
    MXCompressor,
    OmniReduceCompressor,
    Ring,
    THCCompressor,
    Topology,
    Uncompressed,
    measure_error,
)
from dynamiq.core.errors import DynamiqError
from dynamiq.core.registry import AnyCompressor, AnyTopology
from dynamiq.planner.errors.observation import spectrum_of
from dynamiq.planner.errors.prediction import predicted_vnmse
from dynamiq.planner.profiles.spectrum import GradientSpectrum
from dynamiq.simulation.sources import read, resampled
from evaluation.command import refuse
from evaluation.records import Record
from evaluation.rows import RunRow, read_rows, run_missing

SEED = 1000
"""Of the ranks whose spectrum predicts the errors of others."""
NOTHING = 1e-13
"""What FP32 loses, whose prediction is 0."""
SPECTRUM_RANKS = 8
"""Drawn ranks whose spectrum predicts the errors of more."""


@dataclass(frozen=True)
class Effort:
    """How often a format is measured.

    Attributes:
        orders: Orders of the ranks; few large entries decide what nearest rounding loses.
        warm_up: Calls before the one that counts, for formats that learn from them.
    """

    orders: int
    warm_up: int = 0


_NEAREST, _DITHERED, _ALIKE = Effort(32), Effort(8, 2), Effort(4)
_BOUND = (Ring(), Butterfly())
FORMATS: dict[str, tuple[Compressor, Effort]] = {
    "FP32": (Uncompressed(), _ALIKE),
    "BF16": (Uncompressed("bf16"), _NEAREST),
    "MXFP8 E4M3": (MXCompressor("mxfp8_e4m3"), _NEAREST),
    **{f"default, {bits} bits": (DynamiQCompressor(bits), _DITHERED) for bits in (3, 4, 5, 6)},
    "MXFP8 E5M2": (MXCompressor("mxfp8_e5m2"), _NEAREST),
    "MXFP6 E3M2": (MXCompressor("mxfp6_e3m2"), _NEAREST),
    "MXFP6 E2M3": (MXCompressor("mxfp6_e2m3"), _NEAREST),
    "MXFP4 E2M1": (MXCompressor("mxfp4_e2m1"), _NEAREST),
    "MXFP8 E4M3, ceil": (MXCompressor("mxfp8_e4m3", scale_rule="ceil"), _NEAREST),
    "FP16": (Uncompressed("fp16"), _NEAREST),
    **{f"rotated, {b} bits": (DynamiQCompressor.rotated(b), _DITHERED) for b in (3, 5)},
    **{f"local, {b} bits": (DynamiQCompressor.local(b), _DITHERED) for b in (3, 5)},
    "paper, 5 bits": (DynamiQCompressor.paper(5), _ALIKE),
    "paper, stochastic, 5 bits": (DynamiQCompressor.paper(5, rounding="stochastic"), _ALIKE),
    "THC": (THCCompressor.uniform(), _ALIKE),
    "THC, table": (THCCompressor.table(), _ALIKE),
    "OmniReduce, 5 bits": (OmniReduceCompressor(mode="topk", bit_budget=5), Effort(2, 20)),
}


class Settings(Record):
    """What is measured.

    Attributes:
        gradients: Name of the file.
        drawn: Whether ranks are drawn.
    """

    gradients: str
    drawn: bool
    name: str
    compressor: AnyCompressor
    topology: AnyTopology
    world_size: int
    orders: int
    warm_up: int


class Row(RunRow):
    """What was measured: the vNMSE of each order."""

    settings: Settings
    vnmse: tuple[float, ...]


@dataclass(frozen=True)
class Sample:
    """Whose gradients are reduced.

    Attributes:
        path: The file.
        drawn: Whether ranks are drawn.
        sizes: Ranks.
    """

    path: Path
    drawn: bool
    sizes: tuple[int, ...]


def grid(sample: Sample, names: Sequence[str]) -> Iterator[Settings]:
    """Yield what is measured of a sample."""
    for n, name in product(sample.sizes, names):
        compressor, effort = FORMATS[name]
        orders = effort.orders
        if sample.drawn:  # thousands of supergroups, none of which decides alone
            orders = 2 if n > 16 else 4
        elif n < 8 and orders > 4:
            orders = 28  # as many as there are pairs of eight ranks
        for topology in _topologies(name, sample.drawn):
            yield Settings(
                gradients=sample.path.stem,
                drawn=sample.drawn,
                name=name,
                compressor=compressor,
                topology=topology,
                world_size=n,
                orders=orders,
                warm_up=effort.warm_up,
            )


def _topologies(name: str, drawn: bool) -> tuple[Topology, ...]:
    others = name in {"BF16", "MXFP8 E4M3", "default, 4 bits"} and not drawn
    return (*_BOUND, Direct(), Hierarchical(ranks_per_node=2)) if others else _BOUND


def measure(settings: Settings, path: Path) -> Row:
    """Measure one row."""
    errors = [
        measure_error(
            _entries(settings, path, order),
            settings.compressor,
            settings.topology,
            seed=order,
            warm_up_calls=settings.warm_up,
        ).vnmse
        for order in range(settings.orders)
    ]
    return Row(settings=settings, vnmse=tuple(errors))


def _entries(settings: Settings, path: Path, order: int) -> Tensor:
    gradients, n = _read(path), settings.world_size
    if settings.drawn:
        return resampled(gradients, None, order).matrix(n)
    return gradients[_picked(n, len(gradients), order)]


def _picked(n: int, ranks: int, order: int) -> Tensor:
    """Return n of the ranks in some order; all choices come before one is repeated."""
    generator = torch.Generator().manual_seed(0)
    choices = list(combinations(range(ranks), n))
    shuffled = torch.randperm(len(choices), generator=generator).tolist()
    chosen = torch.tensor(choices[shuffled[order % len(choices)]])
    return chosen[torch.randperm(n, generator=torch.Generator().manual_seed(order))]


@cache
def _read(path: Path) -> Tensor:
    return read(path)


@cache
def _spectrum(path: Path, drawn: bool, world_size: int, order: int) -> GradientSpectrum:
    """Return what a row is predicted from: of its own ranks, or of eight drawn ones."""
    gradients = _read(path)
    if drawn:
        return spectrum_of(resampled(gradients, None, SEED).matrix(SPECTRUM_RANKS))
    if world_size == len(gradients):
        return spectrum_of(gradients)
    return spectrum_of(gradients[_picked(world_size, len(gradients), order)])


def predict(row: Row, path: Path) -> float | None:
    """Return the prediction for a row, the mean over its orders."""
    s = row.settings
    orders = 1 if s.drawn or s.world_size == len(_read(path)) else min(s.orders, 28)
    found = [
        predicted_vnmse(
            s.compressor,
            s.topology,
            s.world_size,
            _spectrum(path, s.drawn, s.world_size, order),
        )
        for order in range(orders)
    ]
    known = [error for error in found if error is not None]
    return fmean(known) if known else None


def table(rows: Sequence[Row], path: Path) -> Iterator[str]:
    """Yield the lines of a table."""
    yield "| format | topology | ranks | measured | orders | predicted | off |"
    yield "|---|---|---:|---:|---:|---:|---:|"
    for row in rows:
        s, measured = row.settings, fmean(row.vnmse)
        spread = stdev(row.vnmse) if len(row.vnmse) > 1 else 0.0
        predicted = predict(row, path)
        texts = ("–", "–")
        if predicted is not None:
            off = f"{100 * (predicted / measured - 1):+.0f} %" if measured > NOTHING else "–"
            texts = (f"{predicted:.2e}", off)
        ranks = f"{s.world_size}, drawn" if s.drawn else str(s.world_size)
        yield (
            f"| {s.name} | {s.topology.kind} | {ranks} | {measured:.2e} ± {spread:.0e} | "
            f"{len(row.vnmse)} | {' | '.join(texts)} |"
        )


def main(  # options of a command line
    gradients: Annotated[Path, typer.Argument(help="safetensors: gradients[ranks, d]")],
    rows: Annotated[Path, typer.Option(help="File of rows, added to")],
    ranks: Annotated[list[int] | None, typer.Option(help="2, 4 and 8 by default")] = None,
    drawn: Annotated[bool, typer.Option(help="Draw the ranks")] = False,
    format: Annotated[list[str] | None, typer.Option(help="All by default")] = None,
    show: Annotated[bool, typer.Option(help="Measure nothing, print the table")] = False,
) -> None:
    """Measure what the rows lack, or print all of a file's rows beside their predictions."""
    try:
        if show:
            found = [r for r in read_rows(rows, Row) if r.settings.gradients == gradients.stem]
            for line in table(found, gradients):
                print(line, flush=True)
            return
        every = grid(Sample(gradients, drawn, tuple(ranks or (2, 4, 8))), format or tuple(FORMATS))
        for row in run_missing(every, rows, Row, lambda settings: measure(settings, gradients)):
            s = row.settings
            print(s.gradients, s.name, s.topology.kind, s.world_size, fmean(row.vnmse), flush=True)
    except (DynamiqError, KeyError) as error:
        refuse(f"no such format: {error}" if isinstance(error, KeyError) else str(error))


if __name__ == "__main__":
    typer.run(main)
