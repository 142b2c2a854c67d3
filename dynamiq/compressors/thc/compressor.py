"""THC as a description: what can be chosen, the norms that all ranks reduce, and feedback."""

from itertools import pairwise
from typing import Any, Literal, Self

import torch
from pydantic import Field, field_validator, model_validator
from torch import Tensor

from dynamiq.compressors.thc.encoding import RESIDUAL, THCEncoding, Work, corrected
from dynamiq.compressors.thc.geometry import Geometry
from dynamiq.core.arithmetic import tree_sum
from dynamiq.core.compressor import Compressor, Sizes, State, Statistics
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule
from dynamiq.kernels.hadamard import ops
from dynamiq.kernels.hadamard.operands import LOG_UNIT, MOST, UNIT
from dynamiq.kernels.supergroups.operands import entries_of

CLAMPS = {1 / 32: 2.1539, 1 / 128: 2.6601, 1 / 512: 3.0973, 1 / 1024: 3.2972}
"""How many standard deviations leave out a share of Gaussian entries: t_p by p."""
RECEIVER_TABLE = (0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30)
"""For 4 bits, g = 30 and p = 1/32."""
_MOST_IN_TABLE = 1 << 12


@compressor_registry.register
class THCCompressor(Compressor):
    """Sums integers along the whole schedule: nothing is decoded, or rounded again, at any hop.

    Entries are rotated in blocks (random signs, then a Hadamard matrix), so that they are nearly
    Gaussian; the largest l2 norm over ranks fixes one range for all, ±``clamp`` standard
    deviations; what is beyond is clamped, the rest rounded stochastically to g + 1 integers. A
    message that sums k ranks takes ⌈log2(g·k + 1)⌉ bits per entry. Source: THC, NSDI'24.

    Blocks are the largest powers of two with which padding stays under 1/16, at least 256 entries;
    with bounds slice by slice. Each block has a norm of its own. Random signs are a function of
    (seed, call, entry), rounding of (seed, call, rank, entry); both ends of an interval are exact.

    For Gaussian entries the vNMSE of a sum of n ranks is C + Q / n if all ranks hold the same, and
    C + Q if they are independent; C = 2 ((1 + t²) Φ(-t) - t φ(t)) is lost by clamping at t, and
    Q = E[(v - a)(b - v)] (2 t / g)² by rounding v to a or b: about (2 t / g)² / 6 with all integers
    in use (docs/design/thc.md).

    Contamination unit: the bucket. A NaN or an infinity makes a norm non-finite, and then the whole
    result is NaN on every rank.

    :class:`~dynamiq.ErrorFeedback` does not fit: it asks what a format makes of zeros, and here
    zero lies between two integers and is rounded at random. ``error_feedback`` does what THC
    defines: a rank adds to its entries what its own integers lost in the call before.

    Attributes:
        bits: Of a code: 2^bits - 1 uniform steps, g = 2^bits - 1; with a table, 2^bits integers.
        receiver_table: The integers that codes stand for, ascending from 0 to g; None for uniform
            steps. First messages carry the integers, as all others do.
        clamp: t, in standard deviations. 2.1539 leaves out 1/32 of Gaussian entries, 2.6601 1/128,
            3.0973 1/512, 3.2972 1/1024.
        error_feedback: Whether a rank's loss is added to its next call with the same key. It is
            float32[d], kept for every key; every call needs one.

    Raises:
        ConfigurationError: Options that contradict each other; when a pipeline connects, more ranks
            than sums of g times their number below 2^30 allow: 1024 with 20 bits, 71 million with
            4.
    """

    kind: Literal["thc"] = "thc"
    bits: int = Field(default=4, ge=1, le=20)
    receiver_table: tuple[int, ...] | None = None
    clamp: float = Field(default=CLAMPS[1 / 32], gt=0, le=2.0**20)
    error_feedback: bool = False

    @classmethod
    def uniform(cls, bits: int = 4, **options: Any) -> Self:
        """Return the uniform form: 2^bits - 1 equal steps."""
        return cls(bits=bits, **options)

    @classmethod
    def table(cls, **options: Any) -> Self:
        """Return the table form: 16 of 31 integers, denser where entries are."""
        return cls(**{"bits": 4, "receiver_table": RECEIVER_TABLE, **options})

    @field_validator("receiver_table")
    @classmethod
    def _check_table(cls, table: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if table is None:
            return table
        ascends = all(a < b for a, b in pairwise(table))
        if len(table) < 2 or table[0] != 0 or not ascends or table[-1] >= _MOST_IN_TABLE:
            raise ConfigurationError(
                f"a receiver table ascends from 0 to less than {_MOST_IN_TABLE}, such as "
                f"{RECEIVER_TABLE}; got {table}"
            )
        return table

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.receiver_table is not None and len(self.receiver_table) != 1 << self.bits:
            raise ConfigurationError(
                f"codes of {self.bits} bits need a receiver table of {1 << self.bits} integers, "
                f"got {len(self.receiver_table)}; change bits or the table"
            )
        return self

    @property
    def granularity(self) -> int:
        """g: the largest integer of one rank."""
        return self.receiver_table[-1] if self.receiver_table else (1 << self.bits) - 1

    def unit(self, numel: int, world_size: int) -> int:
        """What payloads are counted in."""
        return UNIT

    def check_world_size(self, world_size: int) -> None:
        """Refuse ranks whose sums may not fit into what kernels count with."""
        largest = self.granularity * world_size
        if largest >= MOST:
            raise ConfigurationError(
                f"sums of {world_size} ranks reach {largest}, and 2^30 is the limit; use fewer "
                f"bits, or at most {(MOST - 1) // self.granularity} ranks"
            )

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics:
        """Return √‖x‖ of every block, float32: no norm overflows or vanishes then, max-reduced."""
        entries = entries_of(corrected(x, state.private.get(RESIDUAL)))
        norms = []
        for part in Geometry.of(layout).parts:
            if not part.blocks:
                continue
            energies = ops.energies(entries[part.start : part.stop])
            missing = part.units - len(energies)
            energies = torch.nn.functional.pad(energies, (0, missing))
            norms.append(tree_sum(energies.view(-1, 1 << (part.log_block - LOG_UNIT))))
        return Statistics(torch.cat(norms).sqrt().sqrt().float(), "max", "fp32")

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> THCEncoding:
        """Derive one range per block from the largest norms."""
        assert statistics is not None
        self.check_world_size(layout.world_size)  # for callers that are no pipelines
        return THCEncoding(self, statistics, layout, call, state)

    def sizes(self, layout: Layout, schedule: Schedule, call: Call, state: State) -> Sizes:
        """Return what a call will send."""
        norms = torch.zeros(Geometry.of(layout).blocks)
        encoding = self.encode(norms, layout, schedule, call, State())
        return Sizes(encoding.positions, encoding.payload_bytes, len(norms), "fp32")

    @property
    def stateful(self) -> bool:
        """Whether a call adds what the one before has lost."""
        return self.error_feedback

    @property
    def fixes_numel(self) -> bool:
        """With error feedback, losses belong to entries."""
        return self.error_feedback

    def next_state(self, encoding: THCEncoding, work: Work) -> State:
        """Return what this rank's integers have lost; after a non-finite call, the state before."""
        if work.residual is None:
            return State()
        return State(private={RESIDUAL: work.residual})
