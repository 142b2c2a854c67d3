"""DynamiQ as a description: what can be chosen, and the statistics that decide the rest."""

from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from dynamiq.compressors.dynamiq.encoding import DynamiQEncoding
from dynamiq.compressors.dynamiq.geometry import Supergroups
from dynamiq.compressors.dynamiq.quantizers import LEVELLED_BELOW, exponential_levels
from dynamiq.core.compressor import Compressor, State, Statistics
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule
from dynamiq.kernels import ops
from dynamiq.kernels.operands import Bucket, entries_of
from dynamiq.kernels.wire import (
    STATISTICS_BYTES,
    SUPERGROUP,
    Quantizer,
    Rounding,
    ScaleRounding,
    supergroup_bytes,
)

WIDTHS = (1, 2, 4, 8, 16)


@compressor_registry.register
class DynamiQCompressor(Compressor):
    """Variable bit widths per supergroup of 256 entries under a mean bit budget.

    Source: DynamiQ §3, arXiv 2602.08923. The sum over ranks of each supergroup's energy and mean
    is reduced first; from these, every rank derives the same order, widths and centring.
    Contamination unit: the supergroup of 256 entries.

    Attributes:
        bit_budget: Mean bits per padded entry that cross a link per pass, all metadata included;
            a ceiling on the mean over ranks. (A reduce-scatter at less than 0.125 bits above the
            least budget exceeds it by up to that.)
        widths: Bit widths in use, from {1, 2, 4, 8, 16}, ascending. 16 bits are plain BF16.
        rounding: "stochastic" (private, unbiased), "correlated" (one stratum per rank, lower
            error, biased over several hops by under 1 % of the error), or "nearest" (biased).
        energy: "centred" allocates by the energy left after the mean is removed, "raw" by the
            energy before.
        scale_rounding: Of the UINT8 group scales: "stochastic" (the paper's) or "up".
        epsilon_4: ε of the 4-bit levels; 0 is uniform.
        epsilon_8: ε of the 8-bit levels.

    Raises:
        ConfigurationError: A budget that cannot be met, or widths that are not a subset.
    """

    kind: Literal["dynamiq"] = "dynamiq"
    bit_budget: float = Field(5.0, gt=0)
    widths: tuple[int, ...] = (2, 4, 8)
    rounding: Rounding = "correlated"
    energy: Literal["centred", "raw"] = "centred"
    scale_rounding: ScaleRounding = "stochastic"
    epsilon_4: float = Field(0.30, ge=0, le=2)
    epsilon_8: float = Field(0.08, ge=0, le=2)

    @classmethod
    def paper(
        cls,
        bit_budget: float = 5.0,
        *,
        widths: tuple[int, ...] = (2, 4, 8),
        rounding: Rounding = "correlated",
        **options: Any,
    ) -> Self:
        """Return the paper's recipe: widths {2, 4, 8}, hierarchical scales, correlated rounding."""
        return cls(
            bit_budget=bit_budget,
            widths=widths,
            rounding=rounding,
            **{"energy": "centred", "scale_rounding": "stochastic", **options},
        )

    @field_validator("widths")
    @classmethod
    def _check_widths(cls, widths: tuple[int, ...]) -> tuple[int, ...]:
        if not widths or list(widths) != sorted(set(widths) & set(WIDTHS)):
            raise ConfigurationError(
                f"widths must be an ascending, non-empty choice from {WIDTHS}, got {widths}"
            )
        return widths

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        least = self.minimum_bit_budget(self.widths)
        if self.bit_budget < least:
            raise ConfigurationError(
                f"a budget of {self.bit_budget} bits per entry cannot be met: with widths "
                f"{self.widths} the least is {least} (narrowest codes, scales and statistics); "
                f"raise bit_budget or allow narrower widths"
            )
        return self

    @staticmethod
    def minimum_bit_budget(widths: tuple[int, ...]) -> float:
        """Return the least budget that these widths can meet, in bits per entry."""
        return (supergroup_bytes(widths[0]) + STATISTICS_BYTES) * 8 / SUPERGROUP

    def quantizer(self) -> Quantizer:
        """Return levels and roundings as the kernels take them."""
        epsilon = {4: self.epsilon_4, 8: self.epsilon_8}
        levels = tuple(
            exponential_levels(w, epsilon.get(w, 0.0)) if w < LEVELLED_BELOW else ()
            for w in self.widths
        )
        return Quantizer(self.widths, levels, self.rounding, self.scale_rounding)

    def unit(self, numel: int, world_size: int) -> int:
        """The supergroup."""
        return SUPERGROUP

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics:
        """Return the energies, then the means, of all supergroups that hold entries (§3.1)."""
        supergroups = Supergroups.of(layout, x.device)
        bucket = Bucket(entries_of(x), supergroups.slices, layout.positions)
        both = torch.stack(ops.statistics(bucket, layout.world_size))
        return Statistics(both[:, supergroups.real].view(-1), "sum", "bf16")

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
        # Statistics cross twice; so do the entries, unless there is no all-gather.
        crossings = 1 if call.gather else 2
        budget = self.bit_budget * SUPERGROUP / 8 - crossings * STATISTICS_BYTES
        budget = max(budget, supergroup_bytes(self.widths[0]))
        return DynamiQEncoding(
            statistics, layout, call, self.quantizer(), budget, self.energy == "centred"
        )
