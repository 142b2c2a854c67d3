"""Tries every format, topology and bucket size that there is, and picks by what is asked for."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Literal

from pydantic import Field

from dynamiq.compressors import DynamiQCompressor, MXCompressor, THCCompressor, Uncompressed
from dynamiq.core.compressor import Compressor
from dynamiq.core.description import Value
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.core.topology import Topology
from dynamiq.planner.cost.buckets import fill
from dynamiq.planner.cost.model import (
    MANY,
    WIRE_FORMATS,
    Configuration,
    Model,
    StepTime,
    without_bytes,
)
from dynamiq.planner.errors.prediction import predicted_vnmse
from dynamiq.planner.profiles.hardware import HardwareProfile, NotNegative, Positive
from dynamiq.planner.profiles.spectrum import GradientSpectrum
from dynamiq.planner.profiles.workload import WorkloadProfile
from dynamiq.planner.units import show_time
from dynamiq.topologies import Butterfly, Direct, Hierarchical, Ring

BUDGETS = (3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 8.0)
BUCKET_CAPS_MB = (None, 5, 10, 50, 100, 400)
MAX_VNMSE = 0.005
"""Between the greatest error that training did not notice in the study (0.0034, at 3.5 bits) and
the one at which it may have (0.0088, at 3 bits): docs/results/study.md."""
_FEW_BUDGETS, _FEW_CAPS_MB = (3.0, 4.0, 5.0, 6.0, 8.0), (None, 100, 400)
"""For very many ranks."""
_MOST_DIRECT = 64
"""Ranks from which on connections of all with all are not tried."""

Goal = Literal["fastest", "least_error"]


class Candidate(Value):
    """One configuration, and what is expected of it.

    Attributes:
        configuration: What is chosen.
        time: A step.
        vnmse: Of the sum; None if the format's error cannot be said.
    """

    configuration: Configuration
    time: StepTime
    vnmse: NotNegative | None


class Objective(Value):
    """What a plan is to be best at.

    Attributes:
        goal: "fastest": the shortest step with an error of at most ``max_vnmse``. "least_error":
            the least error with a step of at most ``max_step_s``.
        max_vnmse: ‖x̂ - x‖² / ‖x‖² of the sum.
        max_step_s: Of a whole step.
        threshold: The least share of a step that compression must save to be worth it.
    """

    goal: Goal = "fastest"
    max_vnmse: Positive = MAX_VNMSE
    max_step_s: Positive | None = None
    threshold: NotNegative = Field(default=0.05, lt=1)

    def is_met(self, candidate: Candidate) -> bool:
        """Return whether a candidate is within the error, or within the step time."""
        if self.goal == "fastest":
            return _error(candidate) <= self.max_vnmse
        return self.max_step_s is not None and candidate.time.step_s <= self.max_step_s


@dataclass(frozen=True)
class Search:
    """All candidates for one cluster and one training.

    Attributes:
        hardware: The cluster.
        workload: The training.
        spectrum: What errors are predicted from.
        compressors: To be tried; None for all that can be planned.
    """

    hardware: HardwareProfile
    workload: WorkloadProfile
    spectrum: GradientSpectrum
    compressors: Sequence[Compressor] | None = None
    _errors: dict[tuple[Compressor, Topology], float | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def own_format(self) -> Compressor:
        """Gradients as they are."""
        return Uncompressed(WIRE_FORMATS[self.workload.dtype])

    @cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """What can be chosen, the fastest first.

        Left out are topologies and bucket sizes with which latency alone makes a step longer than
        the best without compression, which has no error.

        Raises:
            ConfigurationError: The profile has no costs of uncompressed gradients.
        """
        model, own = Model(self.hardware, self.workload), self.own_format
        places = list(product(self.bucket_caps(), self.topologies()))
        found = [self._candidate(model, own, *place) for place in places]
        limit_s = min(candidate.time.step_s for candidate in found)
        ideal = Model(without_bytes(self.hardware, own), self.workload)
        places = [p for p in places if self._candidate(ideal, own, *p).time.step_s < limit_s]
        # Topologies last: what a format has for a bucket serves all of them.
        caps = dict.fromkeys(cap for cap, _ in places)
        for cap, compressor in product(caps, self.formats()):
            for topology in (topology for other, topology in places if other == cap):
                # What was not measured here, or cannot sum so many ranks, is left out, too.
                with suppress(ConfigurationError):
                    found.append(self._candidate(model, compressor, cap, topology))
        return tuple(sorted(found, key=lambda c: (c.time.step_s, _error(c))))

    def _candidate(
        self, model: Model, compressor: Compressor, cap: int | None, topology: Topology
    ) -> Candidate:
        configuration = Configuration(compressor=compressor, topology=topology, bucket_cap_mb=cap)
        time = model.predict(configuration)
        return Candidate(
            configuration=configuration, time=time, vnmse=self._vnmse(compressor, topology)
        )

    @property
    def baseline(self) -> Candidate:
        """The fastest one without compression."""
        own = self.own_format
        return next(c for c in self.candidates if c.configuration.compressor == own)

    def best(self, objective: Objective) -> Candidate:
        """Return the candidate that is best for an objective, worth it or not.

        Raises:
            InputError: Nothing meets it.
        """
        if objective.goal == "least_error" and objective.max_step_s is None:
            raise InputError("the least error within a step time needs that time: max_step_s")
        good = [c for c in self.candidates if objective.is_met(c)]
        if objective.max_step_s is not None and not good:
            first = self.candidates[0]
            raise InputError(
                f"no configuration has a step of at most {show_time(objective.max_step_s)}; the "
                f"fastest, {name_of(first.configuration)}, takes {show_time(first.time.step_s)}"
            )
        return good[0] if objective.goal == "fastest" else min(good, key=_error)

    def front(self) -> tuple[Candidate, ...]:
        """Return the candidates of which none is both faster and better, the fastest first."""
        front: list[Candidate] = []
        for candidate in self.candidates:
            least = _error(front[-1]) if front else float("inf")
            if _error(candidate) < least:
                front.append(candidate)
        return tuple(front)

    def topologies(self) -> Iterator[Topology]:
        """Yield what fits the number of ranks: of thousands on large machines, two levels only."""
        n, g = self.hardware.world_size, self.hardware.ranks_per_node
        if self._has_few_ranks or not 1 < g < n:
            yield Ring()
            yield Butterfly()
        if n <= _MOST_DIRECT:
            yield Direct()
        if 1 < g < n:
            yield Hierarchical(ranks_per_node=g)
            yield Hierarchical(ranks_per_node=g, inter=Butterfly())

    def bucket_caps(self) -> Iterator[int | None]:
        """Yield caps that make different buckets."""
        seen = set()
        for cap in BUCKET_CAPS_MB if self._has_few_ranks else _FEW_CAPS_MB:
            sizes = tuple(bucket.numel for bucket in fill(self.workload, cap))
            if sizes not in seen:
                seen.add(sizes)
                yield cap

    def formats(self) -> Sequence[Compressor]:
        """Return the formats to be tried besides gradients as they are."""
        if self.compressors is not None:
            return self.compressors
        own = self.own_format
        return (
            *(c for c in [Uncompressed("bf16")] if c != own),
            MXCompressor("mxfp8_e4m3"),
            MXCompressor("mxfp6_e3m2"),
            MXCompressor("mxfp4_e2m1"),
            THCCompressor(),
            *(DynamiQCompressor(b) for b in (BUDGETS if self._has_few_ranks else _FEW_BUDGETS)),
        )

    @property
    def _has_few_ranks(self) -> bool:
        return self.hardware.world_size < MANY

    def _vnmse(self, compressor: Compressor, topology: Topology) -> float | None:
        key = compressor, topology
        if key not in self._errors:
            self._errors[key] = self._predicted(compressor, topology)
        return self._errors[key]

    def _predicted(self, compressor: Compressor, topology: Topology) -> float | None:
        if compressor == self.own_format:
            return 0.0
        return predicted_vnmse(compressor, topology, self.hardware.world_size, self.spectrum)


def name_of(configuration: Configuration) -> str:
    """Return a configuration in a few words."""
    topology = configuration.topology.kind
    inter = getattr(configuration.topology, "inter", None)
    if inter is not None:
        topology = f"{topology} ({inter.kind})"
    cap = configuration.bucket_cap_mb
    buckets = "DDP's buckets" if cap is None else f"buckets of {cap} MiB"
    return f"{format_name(configuration.compressor)}, {topology}, {buckets}"


def format_name(compressor: Compressor) -> str:
    """Return what people call a format."""
    budget = getattr(compressor, "bit_budget", None)
    if isinstance(compressor, DynamiQCompressor):
        return f"DynamiQ {budget:g} bits"
    if isinstance(compressor, Uncompressed | MXCompressor):
        return compressor.format.upper().replace("_", " ", 1)
    if isinstance(compressor, THCCompressor):
        return f"THC {compressor.bits} bits"
    return compressor.kind if budget is None else f"{compressor.kind} {budget:g} bits"


def _error(candidate: Candidate) -> float:
    """Return the error to compare by; a format whose error is not known meets no target."""
    return float("inf") if candidate.vnmse is None else candidate.vnmse
