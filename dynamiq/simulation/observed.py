"""A format under observation: what every message loses, measured beside the call itself.

A partial sum is read before it is compressed, and the message is decoded at once, so the error of
a hop is measured where it arises and nothing about a format need be known. Bytes and results are
those of the format alone.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from pydantic import PrivateAttr
from torch import Tensor

from dynamiq.core.compressor import Compressor, Encoding, State, Statistics
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import AnyCompressor
from dynamiq.core.topology import Schedule


@dataclass
class Seen:
    """What the observed messages of one hop sum up to."""

    messages: int = 0
    squared_error: float = 0.0
    payload_bytes: int = 0
    entries: float = 0


@dataclass
class Log:
    """What was observed, on all ranks.

    Attributes:
        chunks: Chunks to observe: all are alike, and each message costs two passes over the bucket.
        places: By chunk, int64[k], the entries that it holds.
        hops: By hop.
        energy: Of the exact sum in these places; known to who knows the sum.
        encoding: Some rank's; its decisions are those of all.
        numel: Entries that it encodes.
    """

    chunks: range
    places: dict[int, Tensor] = field(default_factory=dict)
    hops: dict[int, Seen] = field(default_factory=lambda: defaultdict(Seen))
    energy: float = 0.0
    encoding: Encoding[Any] | None = None
    numel: int = 0


class Observed(Compressor):
    """Another compressor, whose messages are measured in passing."""

    kind: Literal["observed"] = "observed"
    inner: AnyCompressor
    _log: Log = PrivateAttr(default_factory=lambda: Log(range(0)))

    @classmethod
    def by(cls, compressor: Compressor, log: Log) -> Self:
        """Return a compressor under observation, whose messages are noted in ``log``."""
        observed = cls(inner=compressor)
        observed._log = log
        return observed

    @property
    def stateful(self) -> bool:
        """As the observed one."""
        return self.inner.stateful

    def unit(self, numel: int, world_size: int) -> int:
        """As the observed one."""
        return self.inner.unit(numel, world_size)

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics | None:
        """As the observed one."""
        return self.inner.statistics(x, layout, call, state)

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "ObservedEncoding":
        """Observe what the observed one decides."""
        inner = self.inner.encode(statistics, layout, schedule, call, state)
        return ObservedEncoding(inner, layout, self._log)

    def next_state(self, encoding: "ObservedEncoding", work: Any) -> State:
        """As the observed one."""
        return self.inner.next_state(encoding.inner, work)


class ObservedEncoding(Encoding[Any]):
    """Measures each message after it was written."""

    def __init__(self, inner: Encoding[Any], layout: Layout, log: Log) -> None:
        """Observe an encoding."""
        self.inner, self.numel, self.log = inner, layout.numel, log
        self.sums_exactly = inner.sums_exactly
        self._world_size = layout.world_size
        self.positions = inner.positions
        self._rank = 0
        log.encoding, log.numel = inner, layout.numel

    def payload_bytes(self, message: Message, positions: range) -> int:
        """As the observed one."""
        return self.inner.payload_bytes(message, positions)

    def load(self, x: Tensor, rank: int, out: Tensor) -> Any:
        """As the observed one."""
        self._rank = rank
        return self.inner.load(x, rank, out)

    def compress(self, work: Any, message: Message, positions: range, out: Tensor) -> None:
        """Compress, and measure what that lost."""
        if message.chunk not in self.log.chunks:
            self.inner.compress(work, message, positions, out)
            return
        if self.inner.sums_exactly:
            # Its chunks need not hold entries that could be told apart, and nothing is lost.
            self.inner.compress(work, message, positions, out)
            self._note(message, out, self.numel / self._world_size)
            return
        before = torch.empty(self.numel)
        self.inner.store(work, before)
        self.inner.compress(work, message, positions, out)
        self._measure(before, message, positions, out)

    def decompress(self, payload: Tensor, work: Any, message: Message, positions: range) -> None:
        """As the observed one."""
        self.inner.decompress(payload, work, message, positions)

    def decompress_accumulate(
        self, payload: Tensor, work: Any, message: Message, positions: range
    ) -> None:
        """As the observed one."""
        self.inner.decompress_accumulate(payload, work, message, positions)

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: Any,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        """As the observed one, in its two parts where the message is to be measured."""
        arguments = payload, work, incoming, outgoing, positions, out
        if outgoing.chunk in self.log.chunks:
            super().decompress_accumulate_recompress(*arguments)
        else:
            self.inner.decompress_accumulate_recompress(*arguments)

    def store(self, work: Any, out: Tensor, chunk: int | None = None) -> None:
        """As the observed one."""
        self.inner.store(work, out, chunk)

    def _measure(self, before: Tensor, message: Message, positions: range, out: Tensor) -> None:
        chunk = message.chunk
        arrived = self._arrived(0.0, message, positions, out)
        if chunk not in self.log.places:
            # What the message does not replace shows what was there: another background differs.
            other = self._arrived(1.0, message, positions, out)
            self.log.places[chunk] = ((arrived - other).abs() < 0.5).nonzero()[:, 0]
        places = self.log.places[chunk]
        error = (arrived[places] - before[places]).double()
        self.log.hops[message.hop].squared_error += error.square().sum().item()
        self._note(message, out, len(places))

    def _note(self, message: Message, out: Tensor, entries: float) -> None:
        seen = self.log.hops[message.hop]
        seen.messages += 1
        seen.payload_bytes += out.numel()
        seen.entries += entries

    def _arrived(
        self, background: float, message: Message, positions: range, payload: Tensor
    ) -> Tensor:
        out, result = torch.empty(self.numel), torch.empty(self.numel)
        work = self.inner.load(torch.full((self.numel,), background), self._rank, out)
        self.inner.decompress(payload, work, message, positions)
        self.inner.store(work, result)
        return result
