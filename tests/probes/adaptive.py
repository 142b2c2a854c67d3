"""Sizes that depend on earlier calls: a number of bytes per entry, kept in the shared state."""

from typing import Any, Literal

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.compressor import Compressor, State, Statistics
from dynamiq.core.dense import DenseEncoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.randomness import BLOCK, Stream
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule


@compressor_registry.register
class AdaptiveFixedPoint(Compressor):
    """Fixed point of 1, 2 or 3 bytes around the largest magnitude, stochastically rounded.

    The number of bytes is 2 at first, then follows the magnitude of the call before: 1 below 1,
    2 below 16, else 3. Contamination unit: the bucket.
    """

    kind: Literal["probe-adaptive"] = "probe-adaptive"

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics:
        """The largest magnitude."""
        return Statistics(x.float().abs().amax().view(1) if x.numel() else torch.zeros(1), "max")

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "FixedPointEncoding":
        return FixedPointEncoding(statistics, layout, call, state)

    def next_state(self, encoding: Any, work: Any) -> State:
        """Return how many bytes the next call uses."""
        largest = encoding.largest
        if not largest.isfinite():
            return encoding.state
        count = 1 + (largest >= 1.0).long() + (largest >= 16.0).long()
        return State(shared={"bytes": count})


class FixedPointEncoding(DenseEncoding):
    def __init__(self, largest: Tensor, layout: Layout, call: Call, state: State) -> None:
        super().__init__(layout, call)
        self.state = state
        self.largest = largest[0]
        self.width = int(state.shared["bytes"]) if state.shared else 2
        self.top = 256**self.width // 2 - 1

    def value_bytes(self, count: int, message: Message) -> int:
        return count * self.width

    def write_values(self, values: Tensor, message: Message, entry: int, out: Tensor) -> None:
        scale = self._scale(message)
        first, last = entry // BLOCK, -(-(entry + values.numel()) // BLOCK)
        call = self.call
        key = randomness.key(call.seed, call.number, Stream.ENTRY, message.hop, message.sender)
        blocks = torch.arange(first, last, device=values.device)
        words = randomness.words(key, blocks).view(-1)[entry - first * BLOCK :][: values.numel()]
        codes = (values.double() / torch.where(scale == 0, 1.0, scale)).add_(
            randomness.uniform(words)
        )
        codes = codes.floor_().nan_to_num_(0.0).clamp_(-self.top, self.top).to(torch.int32)
        out.copy_(codes.view(torch.uint8).view(-1, 4)[:, : self.width].reshape(-1))

    def read_values(self, payload: Tensor, message: Message, count: int) -> Tensor:
        # The sign comes back by shifting the bytes up and down again.
        wide = torch.zeros(count, 4, dtype=torch.uint8, device=payload.device)
        wide[:, 4 - self.width :] = payload.view(-1, self.width)
        codes = wide.view(torch.int32).view(-1) >> 8 * (4 - self.width)
        return (codes * self._scale(message)).float()

    def _scale(self, message: Message) -> Tensor:
        """The step of a sum of k ranks, with room for the steps that rounding adds."""
        room = 1.0 + message.summed / self.top
        return self.largest.double() * (message.summed * room / self.top)
