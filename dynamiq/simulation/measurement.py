"""A row of the report: one compressor on one topology, several seeds."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from dynamiq.core.compressor import Compressor
from dynamiq.core.topology import Topology
from dynamiq.simulation import figures
from dynamiq.simulation.observed import Log
from dynamiq.simulation.row import HopRow, Row
from dynamiq.simulation.worlds import Attempt, Trial, World
from dynamiq.topologies import Hierarchical


@dataclass(frozen=True)
class Case:
    """What to simulate.

    Attributes:
        name: Of the compressor.
        compressor: What it is.
        topology: Who sends what to whom.
        bit_budget: What was asked for; None if the format has none.
    """

    name: str
    compressor: Compressor
    topology: Topology
    bit_budget: float | None


@dataclass(frozen=True)
class Effort:
    """How much to simulate.

    Attributes:
        seeds: Calls to average over, each with its own rounding.
        warm_up_calls: Calls before the one that is measured, for formats that learn from them.
        hops: Whether to measure what every hop adds, in the first of these calls; never with
            ``Hierarchical``.
        orders: Orders of the ranks to average over, each with all seeds; the first is theirs.
    """

    seeds: int = 5
    warm_up_calls: int = 2
    hops: bool = True
    orders: int = 1


def measure(world: World, case: Case, effort: Effort) -> Row:
    """Simulate a case."""
    trials = [_try(world, case, effort, seed) for seed in range(effort.seeds)]
    target, log = world.target, trials[0].log
    errors = [trial.estimate - target.total for trial in trials]
    relative = [figures.relative(error, target) for error in errors]
    means = [statistics.fmean(relative), *_in_other_orders(world, case, effort)]
    bias, bias_error = figures.bias(errors)
    # On two levels every column has an encoding, chunks and a prediction of its own.
    levels = isinstance(case.topology, Hierarchical)
    predicted = None if levels else getattr(log.encoding, "predicted_vnmse", None)
    return Row(
        compressor=case.name,
        description=case.compressor.to_dict(),
        topology=case.topology.kind,
        world_size=world.world_size,
        entries=world.numel,
        one_chunk=world.one_chunk,
        bit_budget=case.bit_budget,
        seeds=effort.seeds,
        vnmse=statistics.fmean(means),
        vnmse_spread=statistics.pstdev(relative) if len(relative) > 1 else None,
        bias=bias,
        bias_error=bias_error,
        weighted_error=statistics.fmean(figures.weighted(e, target) for e in errors),
        bits_per_entry=statistics.fmean(trial.bits_per_entry for trial in trials),
        bytes_per_rank=statistics.fmean(trial.bytes_per_rank for trial in trials),
        predicted_vnmse=None if predicted is None else float(predicted),
        hops=_hops(log, case, world.world_size) if effort.hops and not levels else (),
        orders=effort.orders,
        order_spread=statistics.pstdev(means) if len(means) > 1 else None,
    )


def _try(world: World, case: Case, effort: Effort, seed: int, order: int = 0) -> Trial:
    watch = effort.hops and seed == 0 and order == 0
    watch = watch and not isinstance(case.topology, Hierarchical)
    attempt = Attempt(seed, effort.warm_up_calls, watch, order)
    return world.run(case.compressor, case.topology, attempt)


def _in_other_orders(world: World, case: Case, effort: Effort) -> Iterator[float]:
    """Yield the mean error over seeds in each order of the ranks but their own."""
    target = world.target
    for order in range(1, effort.orders):
        trials = (_try(world, case, effort, seed, order) for seed in range(effort.seeds))
        yield statistics.fmean(figures.relative(t.estimate - target.total, target) for t in trials)


def _hops(log: Log, case: Case, world_size: int) -> tuple[HopRow, ...]:
    rows = []
    supergroups = -(-log.numel // case.compressor.unit(log.numel, world_size))
    widths_of_hop = getattr(log.encoding, "widths_of_hop", None)
    for number, hop in enumerate(case.topology.hops(world_size)):
        seen = log.hops[number]
        widths = None if widths_of_hop is None else widths_of_hop(number)
        rows.append(
            HopRow(
                summed=hop.summed,
                transfers=hop.transfers,
                reduce=hop.reduce,
                mean_width=None if widths is None else float(widths.sum() / supergroups),
                payload_bits=8 * seen.payload_bytes / seen.entries if seen.entries else 0.0,
                added=seen.squared_error / log.energy if log.energy else 0.0,
            )
        )
    return tuple(rows)
