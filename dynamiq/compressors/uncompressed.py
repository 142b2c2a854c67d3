"""The identity of every test: floats on the wire, one rounding per hop."""

from typing import Any, Literal

import torch
from torch import Tensor

from dynamiq.core.arithmetic import split_divisor
from dynamiq.core.compressor import Compressor, State
from dynamiq.core.dense import DenseEncoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule

Format = Literal["fp64", "fp32", "bf16", "fp16"]

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@compressor_registry.register
class Uncompressed(Compressor):
    """Entries as FP64, FP32, BF16 or FP16, accumulated in FP32 (FP64 in FP64).

    Values are rounded to nearest once per hop. FP32 sums of integers are exact, and a mean is
    their exact quotient's nearest FP32. For a mean, entries are divided by a power of two, at
    least n, before the first hop, and by what is left of n at the end: exact but for subnormal
    numbers, and no sum leaves the format's range. Contamination unit: the entry.
    """

    kind: Literal["uncompressed"] = "uncompressed"
    format: Format = "fp32"

    def __init__(self, format: Format = "fp32", **data: Any) -> None:
        """Choose what an entry is on the wire."""
        super().__init__(**{"format": format, **data})

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "UncompressedEncoding":
        """No decisions to take."""
        return UncompressedEncoding(layout, call, _DTYPES[self.format])


class UncompressedEncoding(DenseEncoding):
    """Casts to the wire's dtype and back."""

    def __init__(self, layout: Layout, call: Call, wire_dtype: torch.dtype) -> None:
        """Bind to a layout, a call and a dtype."""
        super().__init__(layout, call)
        self.wire_dtype = wire_dtype
        self._first_divisor, self.divisor = split_divisor(call.divisor)
        if wire_dtype is torch.float64:
            self.work_dtype = torch.float64

    def value_bytes(self, count: int, message: Message) -> int:
        """As many as the dtype has."""
        return count * self.wire_dtype.itemsize

    def load(self, x: Tensor, rank: int, out: Tensor) -> Tensor:
        """Copy and scale into range."""
        return super().load(x, rank, out).div_(self._first_divisor)

    def write_values(self, values: Tensor, message: Message, entry: int, out: Tensor) -> None:
        """Round to nearest."""
        out.view(self.wire_dtype).copy_(values)

    def read_values(self, payload: Tensor, message: Message, count: int) -> Tensor:
        """Widen."""
        return payload.view(self.wire_dtype).to(self.work_dtype)
