"""DynamiQ as a description: what can be chosen, and the statistics that decide the rest."""

from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from dynamiq.compressors.dynamiq.decision import Problem
from dynamiq.compressors.dynamiq.encoding import DynamiQEncoding, Work
from dynamiq.compressors.dynamiq.geometry import Capacities
from dynamiq.compressors.dynamiq.hops import HopModel
from dynamiq.compressors.dynamiq.memory import LEAST_OBSERVED, OBSERVATIONS, Memory, Past, Slice
from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.compressors.dynamiq.quantizers import LEVELLED_BELOW, exponential_levels
from dynamiq.compressors.dynamiq.spectrum import Spectrum
from dynamiq.compressors.supergroups import Supergroups
from dynamiq.core.compressor import Compressor, Sizes, State, Statistics
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.operands import Bucket, entries_of
from dynamiq.kernels.supergroups.wire import (
    STATISTIC_BYTES,
    SUPERGROUP,
    GroupScales,
    Quantizer,
    Rounding,
    supergroup_bytes,
)

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16)
FINE_WIDTHS = WIDTHS[:-1]


@compressor_registry.register
class DynamiQCompressor(Compressor):
    """Variable bit widths per supergroup of 256 entries under a mean bit budget.

    The sum over ranks of each supergroup's energy is reduced first; from these, every rank derives
    the same order and the same widths. :meth:`paper` is the recipe of DynamiQ §3, arXiv 2602.08923.
    The default goes beyond it: rotated for a small error, tempered (``energy_power``) because in
    a small study of training under AdamW what was not tempered did worse (docs/design/recipes.md).
    :meth:`rotated` is not tempered and has the least vNMSE; :meth:`local` scales entries in groups
    of 16.
    Every option can be set by itself. Contamination unit: the supergroup.

    Attributes:
        bit_budget: Mean bits per padded entry that cross a link per pass, all metadata included;
            a ceiling on the mean over ranks. (Less than 0.2 bits above the least budget, calls
            exceed it by up to that.)
        widths: Bit widths in use, from 1 to 10 and 16, ascending. 16 bits are plain BF16.
        rounding: "stochastic" (private, unbiased), "correlated" (one stratum per rank, lower
            error, biased over several hops by under 1 % of the error), "nearest" (biased), or
            "dithered": companded subtractive dither, unbiased, at 4 bits with half the error of
            "stochastic" (python -m evaluation.relative_errors).
        rotation: "hadamard" multiplies every supergroup by random signs and an orthonormal
            Hadamard matrix before the first hop, which makes entries nearly Gaussian: the least
            squared error, spread evenly over the supergroup.
        group_scales: How the UINT8 scales of groups of 16 entries are rounded: "stochastic" (the
            paper's) or "up"; None: one scale for a supergroup, which is enough for rotated ones.
        means: Whether supergroup means over all ranks are sent, and subtracted (§3.1).
        energy: "centred" allocates by the energy left after the mean is removed, "raw" by the
            energy before.
        allocation: "exact" minimises the error by the measured error of each width; "thresholds"
            by the paper's model, in which each bit divides it by four.
        hop_aware: Whether hops have widths of their own: a hop's error grows with the partial sum
            that it carries, and hops do not cost the same. What is known of earlier calls with
            the same key (spectrum, correlation of the ranks) sets each hop's share.
        energy_power: The allocation minimises errors weighted by energy^(energy_power - 1) per
            supergroup; below 1, supergroups with small gradients get more bits. A multiple of 1/8.
        drop_energy: Supergroups with the least energy that have at most this share of all energy
            together are not sent. Biased: use it with error feedback.
        epsilon_4: ε of the 4-bit levels; 0 is uniform. Dithered codes have no levels.
        epsilon_8: ε of the 8-bit levels.

    Raises:
        ConfigurationError: A budget that cannot be met, or options that contradict each other.
    """

    kind: Literal["dynamiq"] = "dynamiq"
    bit_budget: float = Field(default=5.0, gt=0)
    widths: tuple[int, ...] = FINE_WIDTHS
    rounding: Rounding = "dithered"
    rotation: Literal["hadamard"] | None = "hadamard"
    group_scales: GroupScales | None = None
    means: bool = False
    energy: Literal["centred", "raw"] = "raw"
    allocation: Literal["exact", "thresholds"] = "exact"
    hop_aware: bool = True
    energy_power: float = Field(default=0.5, gt=0, le=1, multiple_of=0.125)
    drop_energy: float = Field(default=0.0, ge=0, lt=1)
    epsilon_4: float = Field(default=0.30, ge=0, le=2)
    epsilon_8: float = Field(default=0.08, ge=0, le=2)

    def __init__(self, bit_budget: float = 5.0, **options: Any) -> None:
        """Choose a budget; all other options have names."""
        super().__init__(**{"bit_budget": bit_budget, **options})

    @classmethod
    def paper(cls, bit_budget: float = 5.0, **options: Any) -> Self:
        """Return the paper's recipe: widths {2, 4, 8}, hierarchical scales, correlated rounding."""
        return cls(bit_budget=bit_budget, **{**_PAPER, **options})

    @classmethod
    def local(cls, bit_budget: float = 5.0, **options: Any) -> Self:
        """Return the recipe with a scale for every 16 entries: errors stay near large entries."""
        recipe = {"rotation": None, "group_scales": "up", "energy_power": 1.0}
        return cls(bit_budget=bit_budget, **{**recipe, **options})

    @classmethod
    def rotated(cls, bit_budget: float = 5.0, **options: Any) -> Self:
        """Return the recipe with rotated supergroups and one scale for each: the least vNMSE."""
        recipe = {"rotation": "hadamard", "group_scales": None, "energy_power": 1.0}
        return cls(bit_budget=bit_budget, **{**recipe, **options})

    @field_validator("widths")
    @classmethod
    def _check_widths(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if not widths or list(widths) != sorted(set(widths) & set(WIDTHS)):
            raise ConfigurationError(
                f"widths must be an ascending, non-empty choice from {WIDTHS}, got {widths}"
            )
        return widths

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.bit_budget < self.minimum_bit_budget:
            raise ConfigurationError(
                f"a budget of {self.bit_budget} bits per entry cannot be met: with widths "
                f"{self.widths} the least is {self.minimum_bit_budget} (narrowest codes, scales "
                f"and statistics); raise bit_budget or allow narrower widths"
            )
        if self.energy == "centred" and not self.means:
            raise ConfigurationError(
                'energy="centred" is what subtracting the mean leaves, but means=False: no mean is '
                'known; use means=True, or energy="raw"'
            )
        return self

    @property
    def minimum_bit_budget(self) -> float:
        """The least budget that these options can meet, in bits per entry."""
        least = supergroup_bytes(self.widths[0], self.group_scales) + self.statistics_bytes
        return least * 8 / SUPERGROUP

    @property
    def statistics_bytes(self) -> int:
        """Bytes of a supergroup's energy and mean."""
        return STATISTIC_BYTES * (2 if self.means else 1)

    @property
    def quantizer(self) -> Quantizer:
        """Levels and roundings as the kernels take them."""
        return _quantizer(
            self.widths, self.rounding, self.group_scales, (self.epsilon_4, self.epsilon_8)
        )

    def unit(self, numel: int, world_size: int) -> int:
        """The supergroup."""
        return SUPERGROUP

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics:
        """Return the energies, then the means, of all supergroups that hold entries (§3.1).

        At the end, what this rank has measured of the previous result, if hops have shares and the
        bucket is large enough for that to cost little.
        """
        supergroups = Supergroups.of(layout, x.device)
        bucket = Bucket(entries_of(x), supergroups.slices, layout.positions)
        energy, mean = ops.statistics(bucket, layout.world_size)
        parts = [part[supergroups.real] for part in ([energy, mean] if self.means else [energy])]
        if self._observes(layout):
            parts.append(state.private.get("observed", x.new_zeros(OBSERVATIONS)).float())
        return Statistics(torch.cat(parts), "sum", "bf16")

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> DynamiQEncoding:
        """Derive order, widths, centring and range from the reduced statistics."""
        assert statistics is not None
        values = Supergroups.of(layout, statistics.device).units * (2 if self.means else 1)
        problem = self.problem(layout, schedule, call, statistics.device)
        spectrum = Spectrum.of(statistics[:values], layout, call, self.energy == "centred")
        past = Past(state, statistics[values:], Memory.of(state.shared))
        return DynamiQEncoding(problem, spectrum, past, layout, call)

    def sizes(self, layout: Layout, schedule: Schedule, call: Call, state: State) -> Sizes:
        """Return what a call will send."""
        problem = self.problem(layout, schedule, call, torch.device("cpu"))
        totals = problem.totals_after(Memory.of(state.shared))
        values = layout.units * (2 if self.means else 1)
        if self._observes(layout):
            values += OBSERVATIONS
        payload_bytes = partial(problem.payload_bytes, totals)
        return Sizes(problem.deal.tiles, payload_bytes, values, "bf16")

    @property
    def stateful(self) -> bool:
        """Whether hops get shares that follow from earlier calls."""
        return self.hop_aware

    @property
    def needs_key(self) -> bool:
        """Calls without a key are as good as a first call."""
        return False

    def next_state(self, encoding: DynamiQEncoding, work: Work) -> State:
        """Measure this rank's slice of the result, and set the next call's shares."""
        spectrum, past = encoding.spectrum, encoding.past
        if not self.hop_aware or not spectrum.is_finite:
            return past.state
        layout, call = encoding.layout, encoding.call
        model = encoding.decision.problem.model
        observes = self._observes(layout)
        memory = past.memory
        if observes:
            memory = memory.learned(past.observed, model.world_size)
        if not past.memory.is_due:
            return State(replace(memory, calls=memory.calls + 1).shared())
        memory = encoding.decision.next_memory(memory)
        if not observes:
            return State(memory.shared())
        start, stop = layout.slice_bounds(work.rank)
        first = work.rank * layout.positions
        assert work.stored is not None
        own = Slice(
            work.stored[start:stop] if call.gather else work.stored,
            call.divisor,
            encoding.decision.bands_of_units()[first : first + layout.positions],
            self.rotation is not None,
            self.group_scales,
        )
        return State(memory.shared(), {"observed": own.observe()})

    def _observes(self, layout: Layout) -> bool:
        return self.hop_aware and layout.units >= LEAST_OBSERVED

    def problem(
        self, layout: Layout, schedule: Schedule, call: Call, device: torch.device
    ) -> Problem:
        """Return what a bucket's calls know before their data."""
        deal = Deal.of(layout)
        sizes = tuple(supergroup_bytes(width, self.group_scales) for width in self.widths)
        # Statistics cross twice; so do the entries, unless there is no all-gather.
        crossings = 1 if call.gather else 2
        of_statistics = self.statistics_bytes * layout.units
        if self._observes(layout):
            of_statistics += STATISTIC_BYTES * OBSERVATIONS
        budget = self.bit_budget * SUPERGROUP / 8
        budget -= crossings * of_statistics / max(1, layout.units)
        capacities = Capacities.of(deal, sizes, budget, device)
        return Problem(self, deal, HopModel.of(schedule, call.gather), capacities)


@lru_cache(maxsize=64)
def _quantizer(
    widths: tuple[int, ...],
    rounding: Rounding,
    group_scales: GroupScales | None,
    epsilons: tuple[float, float],
) -> Quantizer:
    epsilon = dict(zip((4, 8), epsilons, strict=True))
    has_levels = rounding != "dithered"
    levels = tuple(
        exponential_levels(w, epsilon.get(w, 0.0)) if w < LEVELLED_BELOW and has_levels else ()
        for w in widths
    )
    return Quantizer(widths, levels, rounding, group_scales)


_PAPER = {
    "widths": (2, 4, 8),
    "rounding": "correlated",
    "rotation": None,
    "group_scales": "stochastic",
    "means": True,
    "energy": "centred",
    "allocation": "thresholds",
    "hop_aware": False,
    "energy_power": 1.0,
}
