"""Error feedback around any format: what a message lost is added to the next call's entries."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import field_validator
from torch import Tensor

from dynamiq.compressors.thc import THCCompressor
from dynamiq.core.compressor import Compressor, Encoding, Sizes, State, Statistics
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import AnyCompressor, compressor_registry
from dynamiq.core.topology import Schedule

RESIDUAL = "residual"
"""Name of what is owed, in the private state."""
INNER = "inner."
"""Prefix of the inner format's state, shared and private."""


@compressor_registry.register
class ErrorFeedback(Compressor):
    """Sends later what the messages of another compressor lose.

    The rank that compresses a message keeps its error, what went in less what others will decode,
    and adds it to its own entries at the next call with the same key. So results over many calls
    add up to the exact sums but for what is still kept: the mean error of a biased format falls
    like 1/T. Each single result becomes worse, for it carries earlier errors too, and a format
    whose error exceeds what it compresses diverges: the paper recipe at 3 bits with stochastic
    rounding does, with nearest rounding it does not (docs/design/error-feedback.md).

    Bytes, statistics and shared randomness are the inner format's, for the corrected entries. A
    call whose result or residual holds a NaN or an infinity leaves the residual as it was; in a
    reduce-scatter each rank sees only its own slice and messages. Every call needs a key.
    Contamination unit: the inner format's.

    Cost, per entry and rank: 4 bytes kept for every key; while a call runs 4 more for corrected
    entries and the payloads sent and received; at its end 4 more and a second working buffer of
    the inner format. With DynamiQ at 5 bits the peak went from 4.3 to 17.7 bytes, and a call took
    2.1 to 2.4 times the CPU time (measured there, too).

    The inner format must be linear: what its buffers hold is a sum of what was loaded and received,
    but for constants of the call. All formats here are, except this one and THC, which has feedback
    of its own.

    Attributes:
        compressor: The inner format.

    Raises:
        ConfigurationError: The inner format keeps residuals itself, or is THC.
    """

    kind: Literal["error_feedback"] = "error_feedback"
    compressor: AnyCompressor

    def __init__(self, compressor: Compressor | None = None, **data: Any) -> None:
        """Choose the inner format."""
        if compressor is not None:
            data["compressor"] = compressor
        super().__init__(**data)

    @field_validator("compressor")
    @classmethod
    def _check_compressor(cls, compressor: Compressor) -> Compressor:
        if isinstance(compressor, ErrorFeedback):
            raise ConfigurationError(
                "error feedback inside error feedback would send every loss twice; use one of them"
            )
        if isinstance(compressor, THCCompressor):
            raise ConfigurationError(
                "THC rounds zeros at random, so that error feedback around it would not see what "
                "is lost; use THCCompressor(error_feedback=True)"
            )
        return compressor

    @property
    def fixes_numel(self) -> bool:
        """Errors belong to entries."""
        return True

    def unit(self, numel: int, world_size: int) -> int:
        """The inner format's."""
        return self.compressor.unit(numel, world_size)

    def check_world_size(self, world_size: int) -> None:
        """The inner format's."""
        self.compressor.check_world_size(world_size)

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics | None:
        """Those of the corrected entries."""
        residual = state.private.get(RESIDUAL)
        entries = x if residual is None else _corrected(x, residual)
        return self.compressor.statistics(entries, layout, call, _inner(state))

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "FeedbackEncoding":
        """The inner format decides."""
        inner = self.compressor.encode(statistics, layout, schedule, call, _inner(state))
        return FeedbackEncoding(inner, layout, call, state.private.get(RESIDUAL))

    def sizes(self, layout: Layout, schedule: Schedule, call: Call, state: State) -> Sizes:
        """The inner format's."""
        return self.compressor.sizes(layout, schedule, call, _inner(state))

    def next_state(self, encoding: "FeedbackEncoding", work: "Work") -> State:
        """Return the errors of this rank's messages, and what the inner format carries on."""
        inner = self.compressor.next_state(encoding.inner, work.inner)
        return State(
            shared=_prefixed(inner.shared),
            private={RESIDUAL: encoding.next_residual(work), **_prefixed(inner.private)},
        )


@dataclass(frozen=True)
class Letter:
    """A payload that this rank sent or received.

    Attributes:
        payload: uint8[m], as it crosses the wire.
        message: Its address.
        positions: Its segment.
    """

    payload: Tensor
    message: Message
    positions: range


@dataclass
class Work:
    """The inner format's buffer, and what is needed to tell afterwards what was lost.

    Attributes:
        inner: What the inner format works on.
        rank: This rank.
        entries: Corrected entries, float32[d] (float64 if the tensor is).
        received: Payloads that were added to ``inner``.
        sent: Payloads that this rank compressed.
        finite: bool[], whether all of the stored result is.
    """

    inner: Any
    rank: int
    entries: Tensor
    received: list[Letter] = field(default_factory=list)
    sent: list[Letter] = field(default_factory=list)
    finite: Tensor | None = None


class FeedbackEncoding(Encoding[Work]):
    """The inner format's, which notes payloads.

    What a call does is what the inner format does for the corrected entries, fused steps included;
    only after its end are payloads decoded once more, to see what was lost. Nothing has to wait
    for that, and no partial sums have to be kept.
    """

    def __init__(
        self, inner: Encoding[Any], layout: Layout, call: Call, residual: Tensor | None
    ) -> None:
        """Wrap an encoding.

        Args:
            inner: The encoding of this call.
            layout: How entries are cut into chunks.
            call: Its address.
            residual: float32[d], what earlier calls lost; None if there were none.
        """
        self.inner = inner
        self.layout = layout
        self.call = call
        self.residual = residual
        self.positions = inner.positions

    def payload_bytes(self, message: Message, positions: range) -> int:
        """The inner format's."""
        return self.inner.payload_bytes(message, positions)

    def load(self, x: Tensor, rank: int, out: Tensor) -> Work:
        """Load corrected entries: a copy, for x may be out, and they are needed at the end."""
        entries = _corrected(x, self.residual)
        return Work(self.inner.load(entries, rank, out), rank, entries)

    def compress(self, work: Work, message: Message, positions: range, out: Tensor) -> None:
        """Compress, and note what was said."""
        self.inner.compress(work.inner, message, positions, out)
        work.sent.append(Letter(out, message, positions))

    def decompress(self, payload: Tensor, work: Work, message: Message, positions: range) -> None:
        """The inner format's."""
        self.inner.decompress(payload, work.inner, message, positions)

    def decompress_accumulate(
        self, payload: Tensor, work: Work, message: Message, positions: range
    ) -> None:
        """Add, and note what was received."""
        self.inner.decompress_accumulate(payload, work.inner, message, positions)
        work.received.append(Letter(payload, message, positions))

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: Work,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        """Let the inner format fuse, and note both."""
        self.inner.decompress_accumulate_recompress(
            payload, work.inner, incoming, outgoing, positions, out
        )
        work.received.append(Letter(payload, incoming, positions))
        work.sent.append(Letter(out, outgoing, positions))

    def store(self, work: Work, out: Tensor, chunk: int | None = None) -> None:
        """Store, and note whether the result is finite."""
        self.inner.store(work.inner, out, chunk)
        work.finite = _is_finite(out)

    def next_residual(self, work: Work) -> Tensor:
        """Return float32[d]: what this rank lost, or the residual before if anything is not finite.

        The choice is made on the device, so that nobody waits for it. Uses ``work`` up.
        """
        lost = self._lost(work).to(torch.float32)
        assert work.finite is not None, "a residual belongs to a call that was stored"
        finite = work.finite & _is_finite(lost)
        before = lost.new_zeros(()) if self.residual is None else self.residual
        return torch.where(finite, lost, before, out=lost)

    def _lost(self, work: Work) -> Tensor:
        """Return what was put in or received, and is neither in messages nor in the own slice.

        A second buffer of the inner format is given all but the own entries; these are compared as
        they are, so that what a format rounds already when it loads them counts, too.
        """
        lost, divisor = work.entries, self.call.divisor
        finished = None
        if not self.call.gather:
            # Nobody sends the own slice of a reduce-scatter: the result itself is what arrived.
            finished = lost.new_empty(self.layout.slice_numel(work.rank))
            self.inner.store(work.inner, finished, work.rank)
        work.inner = None  # a second buffer will take its place
        entries = torch.zeros_like(lost)
        buffer = self.inner.load(entries, work.rank, entries)
        for letter in work.received:
            self.inner.decompress_accumulate(
                letter.payload, buffer, letter.message, letter.positions
            )
        work.received.clear()
        self.inner.store(buffer, entries)
        lost.add_(entries, alpha=divisor)
        for letter in work.sent:
            self.inner.decompress(letter.payload, buffer, letter.message, letter.positions)
        self.inner.store(buffer, entries)
        if finished is not None:
            start, stop = self.layout.slice_bounds(work.rank)
            entries[start:stop] = finished
        return lost.sub_(entries, alpha=divisor)


def _corrected(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return x[d] and what earlier calls lost, as new float32[d] (float64 if x is)."""
    if residual is None:
        return x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
    if residual.shape != x.shape:
        raise InputError(
            f"a tensor of {x.numel()} entries came with a key under which the errors of "
            f"{residual.numel()} entries are kept; give tensors of different sizes different keys"
        )
    return x + residual


def _is_finite(x: Tensor) -> Tensor:
    """Return bool[], whether all entries are finite: extremes take a tenth of isfinite()'s time."""
    if not x.numel():
        return x.new_ones((), dtype=torch.bool)
    return torch.stack(x.aminmax()).isfinite().all()


def _inner(state: State) -> State:
    """Return the inner format's part of a state."""

    def part(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {k.removeprefix(INNER): v for k, v in values.items() if k.startswith(INNER)}

    return State(part(state.shared), part(state.private))


def _prefixed(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {INNER + name: value for name, value in values.items()}
