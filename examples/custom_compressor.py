"""A wire format of your own: INT8 with one FP32 scale per block of 64, in 40 lines.

python examples/custom_compressor.py
"""

from typing import Literal

import torch
from torch import Tensor

from dynamiq import (
    Butterfly,
    Call,
    Compressor,
    DenseEncoding,
    Direct,
    Layout,
    Message,
    Ring,
    Schedule,
    State,
    compressor_registry,
    measure_error,
)

BLOCK = 64


@compressor_registry.register
class Int8Compressor(Compressor):
    """INT8 codes, rounded to nearest, scaled by each block's maximum at every hop."""

    kind: Literal["example_int8"] = "example_int8"

    def unit(self, numel: int, world_size: int) -> int:
        return BLOCK

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "Int8Encoding":
        return Int8Encoding(layout, call)


class Int8Encoding(DenseEncoding):
    """A payload is the codes of all entries, then the scales of all blocks."""

    def value_bytes(self, count: int, message: Message) -> int:
        return count + 4 * -(-count // BLOCK)

    def write_values(self, values: Tensor, message: Message, entry: int, out: Tensor) -> None:
        blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(1) / 127
        codes = (blocks / torch.where(scales > 0, scales, 1.0)[:, None]).round().to(torch.int8)
        out[: len(values)] = codes.view(-1)[: len(values)].view(torch.uint8)
        out[len(values) :] = scales.view(torch.uint8)

    def read_values(self, payload: Tensor, message: Message, count: int) -> Tensor:
        scales = payload[count:].clone().view(torch.float32)
        codes = payload[:count].view(torch.int8).to(torch.float32)
        return codes * scales.repeat_interleave(BLOCK)[:count]


def main() -> None:
    gradients = torch.randn(6, 10_000, generator=torch.Generator().manual_seed(0))
    for topology in (Ring(), Butterfly(), Direct()):
        report = measure_error(gradients, Int8Compressor(), topology)
        print(f"{topology.kind}: {report.bits_per_entry:.2f} bits, vNMSE {report.vnmse:.1e}")


if __name__ == "__main__":
    main()
