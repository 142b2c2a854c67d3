"""Error feedback around any format: what a message lost is added to the next call's entries."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from dynamiq.core.compressor import Compressor, Encoding, State, Statistics
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import AnyCompressor, compressor_registry
from dynamiq.core.topology import Schedule

INNER = "inner."
"""Prefix of the inner format's state."""


@compressor_registry.register
class Feedback(Compressor):
    """The rank that compresses a message keeps what it lost, and adds it to its own next entries.

    Knows nothing of the inner format: the loss is the difference between what ``store`` gives for
    the partial sums and for the decoded message. The inner format must be linear, and its state
    must not depend on the working buffer. Contamination unit: the inner format's.
    """

    kind: Literal["probe-feedback"] = "probe-feedback"
    inner: AnyCompressor

    def unit(self, numel: int, world_size: int) -> int:
        return self.inner.unit(numel, world_size)

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics | None:
        return self.inner.statistics(_corrected(x, state), layout, call, _inner_state(state))

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "FeedbackEncoding":
        inner = self.inner.encode(statistics, layout, schedule, call, _inner_state(state))
        return FeedbackEncoding(inner, layout, call, state)

    def next_state(self, encoding: "FeedbackEncoding", work: "Work") -> State:
        lost = encoding.lost(work)
        result = torch.empty_like(lost)
        encoding.inner.store(work.result, result)
        if not (result.isfinite().all() and lost.isfinite().all()):
            return encoding.state
        inner = self.inner.next_state(encoding.inner, work.result)
        return State(
            shared={INNER + name: value for name, value in inner.shared.items()},
            private={
                "lost": lost,
                **{INNER + name: value for name, value in inner.private.items()},
            },
        )


def _inner_state(state: State) -> State:
    def strip(values: Any) -> dict[str, Tensor]:
        return {k.removeprefix(INNER): v for k, v in values.items() if k.startswith(INNER)}

    return State(strip(state.shared), strip(state.private))


def _corrected(x: Tensor, state: State) -> Tensor:
    """Return the entries with what earlier messages lost."""
    values = x.to(torch.float32, copy=True)  # x may be the output, and is needed after it
    return values + state.private["lost"] if state.private else values


@dataclass
class Work:
    """Three working buffers of the inner format."""

    sums: Any
    """Own entries and what was received: what compress is given."""
    sent: Any
    """What this rank's own messages say."""
    result: Any
    """The finished chunks."""
    rank: int
    lost_in_load: Tensor
    """What rounding before the first message lost, as formats do that sum integers."""
    compressed: set[int] = field(default_factory=set)
    """Chunks this rank compressed a message of."""


class FeedbackEncoding(Encoding[Work]):
    def __init__(self, inner: Encoding[Any], layout: Layout, call: Call, state: State) -> None:
        self.inner, self.layout, self.call, self.state = inner, layout, call, state
        self.positions = inner.positions

    def payload_bytes(self, message: Message, positions: range) -> int:
        return self.inner.payload_bytes(message, positions)

    def load(self, x: Tensor, rank: int, out: Tensor) -> Work:
        corrected = _corrected(x, self.state)
        nothing = torch.zeros_like(corrected)
        sums, sent, result = (
            self.inner.load(values, rank, torch.empty_like(corrected))
            for values in (corrected, nothing, nothing)
        )
        # Differences, since what a format adds to every buffer, such as a mean, is no loss.
        loaded = self._stored(sums) - self._stored(sent)
        return Work(sums, sent, result, rank, corrected - loaded)

    def compress(self, work: Work, message: Message, positions: range, out: Tensor) -> None:
        self.inner.compress(work.sums, message, positions, out)
        self.inner.decompress(out, work.sent, message, positions)
        work.compressed.add(message.chunk)

    def decompress(self, payload: Tensor, work: Work, message: Message, positions: range) -> None:
        self.inner.decompress(payload, work.result, message, positions)

    def decompress_accumulate(
        self, payload: Tensor, work: Work, message: Message, positions: range
    ) -> None:
        self.inner.decompress_accumulate(payload, work.sums, message, positions)

    def store(self, work: Work, out: Tensor, chunk: int | None = None) -> None:
        if chunk is None:
            self.inner.store(work.result, out)
        else:
            self.inner.store(work.sums, out, chunk)

    def lost(self, work: Work) -> Tensor:
        """Return float32[d]: what was put in or received, and is not in this rank's messages."""
        lost = self._stored(work.sums) - self._stored(work.sent)
        if self.layout.bounds is not None and work.rank not in work.compressed:
            # A reduce-scatter: the own chunk was never sent, and nothing of it is lost.
            start, stop = self.layout.slice_bounds(work.rank)
            lost[start:stop] = 0.0
        return lost + work.lost_in_load

    def _stored(self, inner: Any) -> Tensor:
        """Return a working buffer as entries of the sum."""
        values = torch.empty(self.layout.numel)
        self.inner.store(inner, values)
        return values * self.call.divisor
