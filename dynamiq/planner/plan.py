"""A plan: what to use, what to expect of it, and why; a value that outlives the search."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dynamiq.core.description import Value
from dynamiq.core.transport import Transport
from dynamiq.planner import files
from dynamiq.planner.cost.model import Model
from dynamiq.planner.profiles.hardware import NotNegative
from dynamiq.planner.search import Candidate, Objective, Search, format_name, name_of
from dynamiq.planner.units import show_time

_ALTERNATIVES = 8


class Plan(Value):
    """What was asked, what was found.

    Attributes:
        version: Of this format; a plan of another one is refused.
        cluster: Name of the hardware's profile.
        workload: Name of the workload's profile.
        world_size: Ranks that it is for.
        objective: What was asked for.
        compress: Whether compression is worth it.
        chosen: What to use: ``baseline`` if it is not.
        best: The best candidate, worth it or not.
        baseline: The fastest without compression.
        gain: The share of the baseline's step that ``best`` saves; negative if it is slower.
        sent_bytes: What a rank sends in a step with what is chosen, headers and statistics
            included, before hops have learned their shares.
        advice: All this in a sentence.
        assumptions: What was not measured, one sentence each.
        alternatives: The best candidates of each format and topology that meet the objective, the
            fastest first.
        front: The candidates of which none is both faster and better.
    """

    version: Literal[1] = 1
    cluster: str
    workload: str
    world_size: int
    objective: Objective
    compress: bool
    chosen: Candidate
    best: Candidate
    baseline: Candidate
    gain: float
    sent_bytes: NotNegative
    advice: str
    assumptions: tuple[str, ...] = ()
    alternatives: tuple[Candidate, ...] = ()
    front: tuple[Candidate, ...] = ()

    @property
    def bucket_cap_mb(self) -> int | None:
        """What ``DistributedDataParallel(..., bucket_cap_mb=...)`` should be given."""
        return self.chosen.configuration.bucket_cap_mb

    def pipeline(self, transport: Transport, **options: Any) -> Any:
        """Return the :class:`dynamiq.Pipeline` of what is chosen.

        Where a plan says not to compress this is one that does not, and DDP without a hook is as
        good.

        Args:
            transport: Moves the bytes.
            options: The other arguments of :class:`dynamiq.Pipeline`, such as ``seed``.

        Raises:
            ConfigurationError: An option is refused.
        """
        from dynamiq.pipeline import Pipeline

        chosen = self.chosen.configuration
        settings = {"segments": chosen.segments, "min_numel": chosen.min_numel, **options}
        return Pipeline(chosen.compressor, chosen.topology, transport, **settings)


def load(path: Path | str) -> Plan:
    """Return a plan from a file, which ``dynamiq plan --json`` wrote.

    Raises:
        InputError: The file is missing, holds no plan, or one of another version.
    """
    return files.read(path, Plan)


def make(search: Search, objective: Objective, assumptions: Sequence[str] = ()) -> Plan:
    """Search, and say what follows.

    Args:
        search: What there is.
        objective: What is asked for.
        assumptions: What was not measured.

    Raises:
        InputError: Nothing meets the objective.
        ConfigurationError: The hardware's profile has no costs of uncompressed gradients.
    """
    baseline, best = search.baseline, search.best(objective)
    gain = 1.0 - best.time.step_s / baseline.time.step_s
    limit = objective.max_step_s
    needed = limit is not None and baseline.time.step_s > limit
    is_plain = best.configuration.compressor == search.own_format
    compress = not is_plain and (needed or gain >= objective.threshold)
    chosen = best if compress else baseline
    model = Model(search.hardware, search.workload)
    return Plan(
        cluster=search.hardware.name,
        workload=search.workload.name,
        world_size=search.hardware.world_size,
        objective=objective,
        compress=compress,
        chosen=chosen,
        best=best,
        baseline=baseline,
        gain=gain,
        sent_bytes=model.bytes_sent(chosen.configuration),
        advice=_advice(chosen, best, baseline, objective),
        assumptions=tuple(assumptions),
        alternatives=_alternatives([c for c in search.candidates if objective.is_met(c)]),
        front=search.front(),
    )


def _alternatives(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    found: dict[tuple[str, str], Candidate] = {}
    for candidate in candidates:
        configuration = candidate.configuration
        key = (configuration.compressor.digest().hex(), configuration.topology.kind)
        found.setdefault(key, candidate)
    return tuple(found.values())[:_ALTERNATIVES]


def _advice(chosen: Candidate, best: Candidate, baseline: Candidate, objective: Objective) -> str:
    plain_s, best_s = baseline.time.step_s, best.time.step_s
    exposed_s = baseline.time.exposed_s
    waits = f"communication adds {show_time(exposed_s)} to a step, {exposed_s / plain_s:.0%} of it"
    if chosen == baseline:
        if best == baseline:
            other = "no format that meets the target is faster"
        else:
            saved = 1.0 - best_s / plain_s
            change = f"saves {saved:.1%}" if saved >= 0 else f"loses {-saved:.1%}"
            other = (
                f"the best, {name_of(best.configuration)}, {change}, less than the "
                f"{objective.threshold:.0%} that are worth it"
            )
        return f"Do not compress: {waits} without compression ({show_time(plain_s)}), and {other}."
    configuration = chosen.configuration
    cap = configuration.bucket_cap_mb
    buckets = "DDP's default buckets" if cap is None else f"bucket_cap_mb={cap}"
    error = "unknown error" if chosen.vnmse is None else f"a vNMSE of {chosen.vnmse:.1e}"
    return (
        f"Use {format_name(configuration.compressor)}, topology {configuration.topology.kind}, "
        f"with {buckets}: a step takes {show_time(chosen.time.step_s)} instead of "
        f"{show_time(plain_s)}, {plain_s / chosen.time.step_s:.2f} times as fast, with {error}; "
        f"without compression {waits}."
    )
