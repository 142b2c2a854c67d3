"""Sizes that depend on the hop, with nothing but the dense encoding's three methods."""

from typing import Literal

import torch
from torch import Tensor

from dynamiq.core.compressor import Compressor, State
from dynamiq.core.dense import DenseEncoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule

DTYPES = {"fp8": torch.float8_e5m2, "bf16": torch.bfloat16, "fp32": torch.float32}


@compressor_registry.register
class FloatPerHop(Compressor):
    """Sends hop h in format h modulo the number of formats, rounded to nearest.

    Contamination unit: the entry.
    """

    kind: Literal["probe-hops"] = "probe-hops"
    formats: tuple[Literal["fp8", "bf16", "fp32"], ...] = ("fp32", "fp8", "bf16")

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "FloatPerHopEncoding":
        formats = [self.formats[h % len(self.formats)] for h in range(len(schedule.hops))]
        return FloatPerHopEncoding(layout, call, [DTYPES[f] for f in formats])


class FloatPerHopEncoding(DenseEncoding):
    def __init__(self, layout: Layout, call: Call, dtypes: list[torch.dtype]) -> None:
        super().__init__(layout, call)
        self.dtypes = dtypes

    def value_bytes(self, count: int, message: Message) -> int:
        return count * self.dtypes[message.hop].itemsize

    def write_values(self, values: Tensor, message: Message, entry: int, out: Tensor) -> None:
        out.view(self.dtypes[message.hop]).copy_(values)

    def read_values(self, payload: Tensor, message: Message, count: int) -> Tensor:
        return payload.view(self.dtypes[message.hop]).float()
