"""What a wire format must say: how entries become bytes, and how partial sums are carried on.

A :class:`Compressor` is a description: a frozen value, equal on all ranks. For each call it makes
an :class:`Encoding`, which holds the decisions of that call and does the work. What survives from
call to call is a :class:`State`, an explicit value that the pipeline keeps.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor

from dynamiq.core.description import Description
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.topology import Schedule

W = TypeVar("W")
StatisticsFormat = Literal["bf16", "fp32", "bit"]


@dataclass(frozen=True)
class Statistics:
    """Numbers that all ranks reduce before they can encode.

    They travel on the main schedule; every rank ends with the same bits.

    Attributes:
        values: float32[k], k the same on all ranks.
        reduction: "sum" or "max" (max propagates NaN).
        format: "bf16" (stochastic rounding at every hop, which does not stagnate on long rings),
            "fp32", or "bit": one bit for each value, 1 for all that are not 0, so that the maximum
            is what any rank says. With "max" "bf16" is not exact.

    Raises:
        ConfigurationError: Another reduction or format, or the sum of bits.
    """

    values: Tensor
    reduction: Literal["sum", "max"] = "sum"
    format: StatisticsFormat = "fp32"

    def __post_init__(self) -> None:
        """Refuse what cannot be sent."""
        if self.reduction not in ("sum", "max") or self.format not in ("bf16", "fp32", "bit"):
            raise ConfigurationError(
                f"statistics are reduced by sum or max, as bf16, fp32 or bit; got "
                f"{self.reduction!r}, {self.format!r}"
            )
        if self.format == "bit" and self.reduction != "max":
            raise ConfigurationError(
                f'statistics of one bit each have no {self.reduction}; use reduction="max", or '
                f'format="fp32"'
            )


@dataclass(frozen=True)
class Sizes:
    """What a call sends, known before its data.

    Attributes:
        positions: Of the encoding.
        payload_bytes: Of the encoding.
        statistics: How many values are reduced first; 0 if none.
        format: What these travel as.
    """

    positions: int
    payload_bytes: Callable[[Message, range], int]
    statistics: int = 0
    format: StatisticsFormat = "fp32"


@dataclass(frozen=True)
class State:
    """What a compressor carries from one call to the next call with the same key.

    Attributes:
        shared: Equal on all ranks; it may decide payload sizes and enters the call's header.
        private: This rank's own, such as the residuals of error feedback.
    """

    shared: Mapping[str, Tensor] = field(default_factory=dict)
    private: Mapping[str, Tensor] = field(default_factory=dict)


class Encoding(ABC, Generic[W]):
    """One call's decisions, immutable, the same on every rank (but for ``State.private``).

    ``work`` belongs to the encoding: float partial sums, integers, a union of blocks. Whoever
    drives the collective never looks inside. ``positions`` selects a segment: a contiguous part
    of ``range(self.positions)`` of every chunk, and the results must not depend on how a chunk is
    split. A payload is a contiguous uint8 tensor whose memory is aligned to 16 bytes, written into
    ``out`` of ``payload_bytes``. Which entries a chunk holds is the encoding's choice, unless the
    layout has bounds: then chunk c is slice c.

    All methods are deterministic given the call's address: seed, call number and message.
    """

    positions: int
    """Parts of a chunk that segments may separate; 0 if there is nothing to send."""

    sums_exactly: bool = False
    """Whether messages lose nothing, so that all error arises where entries are loaded."""

    @property
    def predicted_vnmse(self) -> float | None:
        """The error that this call's sum should have; None if the format does not say.

        ‖x̂ - x‖² / ‖x‖², the mean over this call's random numbers. May wait for the device.
        """
        return None

    @abstractmethod
    def payload_bytes(self, message: Message, positions: range) -> int:
        """Return a payload's size in bytes, equal on all ranks; 0 is neither sent nor awaited."""

    @abstractmethod
    def load(self, x: Tensor, rank: int, out: Tensor) -> W:
        """Bring a rank's own entries x[d] in: the only place where they enter.

        ``out`` is where the result will be stored; it may be x. An encoding may put off reading x,
        and may write the results of a message's positions early, once it has decompressed them.
        """

    @abstractmethod
    def compress(self, work: W, message: Message, positions: range, out: Tensor) -> None:
        """Write the payload of ``message`` from the partial sums in ``work``."""

    @abstractmethod
    def decompress(self, payload: Tensor, work: W, message: Message, positions: range) -> None:
        """Replace the message's chunk in ``work`` by what the payload says (the finished sum).

        Comes after everything else that concerns these positions of the chunk on this rank.
        """

    @abstractmethod
    def decompress_accumulate(
        self, payload: Tensor, work: W, message: Message, positions: range
    ) -> None:
        """Add what the payload says to the message's chunk in ``work``."""

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: W,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        """Add the last incoming payload of a chunk and write the outgoing one.

        An override gives the same bytes as this default, bit for bit; it need not leave the sum
        in ``work``, which is not read again before ``decompress`` replaces it.
        """
        self.decompress_accumulate(payload, work, incoming, positions)
        self.compress(work, outgoing, positions, out)

    @abstractmethod
    def store(self, work: W, out: Tensor, chunk: int | None = None) -> None:
        """Write what ``work`` holds, divided by the call's divisor, to ``out``.

        ``out`` is [d], or with ``chunk`` that chunk's true entries only (reduce-scatter). What
        ``work`` holds stays readable, unless the input was the output.
        """


class Compressor(Description, ABC):
    """A wire format: the object is its configuration.

    Payload sizes follow from configuration, layout, schedule and state, never from this call's
    statistics, so that no device needs to be waited for. A format whose sizes do depend on the
    data says so in its docstring and pays that synchronisation in :meth:`encode`.

    Docstrings of implementations name the *contamination unit*: how far a NaN or infinity in one
    entry spreads (entry, block, supergroup, bucket).
    """

    def unit(self, numel: int, world_size: int) -> int:
        """Return how many entries are treated as one in a tensor of ``numel`` entries."""
        return 1

    def check_world_size(self, world_size: int) -> None:
        """Refuse more ranks than the format can sum; called when a pipeline connects.

        Depends on the configuration alone, so that all ranks refuse, and before anything of a call
        is sent.

        Raises:
            ConfigurationError: There are too many; the message says how many would fit.
        """

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics | None:
        """Return what must be reduced over ranks before encoding x[d]; None if nothing."""
        return None

    @abstractmethod
    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> Encoding[Any]:
        """Decide how this call is encoded, from the reduced statistics float32[k]."""

    def sizes(self, layout: Layout, schedule: Schedule, call: Call, state: State) -> Sizes:
        """Return what a call will send, without any tensor.

        Raises:
            ConfigurationError: Sizes depend on the data.
        """
        zeros = torch.zeros(1).expand(layout.numel)
        statistics = self.statistics(zeros, layout, call, state)
        reduced = None if statistics is None else statistics.values
        encoding = self.encode(reduced, layout, schedule, call, state)
        if statistics is None:
            return Sizes(encoding.positions, encoding.payload_bytes)
        count = statistics.values.numel()
        return Sizes(encoding.positions, encoding.payload_bytes, count, statistics.format)

    @property
    def stateful(self) -> bool:
        """Whether calls depend on earlier calls with the same key."""
        return type(self).next_state is not Compressor.next_state

    @property
    def needs_key(self) -> bool:
        """Whether calls without a key, which begin without state, would be wrong."""
        return self.stateful

    @property
    def fixes_numel(self) -> bool:
        """Whether all calls with a key must have as many entries as the first one."""
        return False

    def next_state(self, encoding: Any, work: Any) -> State:
        """Return the state after a call; a non-finite call returns the state it began with.

        Args:
            encoding: What :meth:`encode` returned for this call.
            work: Its working buffer after the last payload was decoded (in a reduce-scatter only
                this rank's own chunk is finished).
        """
        return State()
