"""Calls of the kernels of the MX formats."""

import torch

from dynamiq.kernels.mx import ops
from dynamiq.kernels.mx.wire import BLOCK, ELEMENTS, SUPERGROUP, Quantizer, Segment, payload_bytes
from dynamiq.roofline.case import Case
from tests.benchmarks.prepared import FORMATS, Prepared, entries_like_gradients
from tests.kernels.devices import on

ROUNDINGS = ("nearest", "stochastic", "prescaled")
DEFAULT = "nearest"
ROUNDING = ("mx_compress", "mx_decompress_accumulate_recompress")


def prepare(case: Case, rounding: str | None, numel: int, device: str) -> Prepared:
    """Return a kernel's call on full blocks."""
    x = entries_like_gradients(numel, FORMATS[case.format]).view(-1, SUPERGROUP)
    values = on(device, x)
    q = Quantizer(ELEMENTS[case.operands], rounding=rounding or DEFAULT)
    segment = Segment(numel // BLOCK, 0, key=1)
    both = (segment, segment)
    size = payload_bytes(q.element, numel)
    payload, out = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    ops.compress(values, segment, q, payload)
    sums = values.clone()
    run, read, written = {
        "mx_compress": (
            lambda: ops.compress(values, segment, q, out),
            (values,),
            (out,),
        ),
        "mx_decompress": (
            lambda: ops.decompress(payload, sums, segment, q),
            (payload,),
            (sums,),
        ),
        "mx_decompress_accumulate": (
            lambda: ops.decompress_accumulate(payload, sums, segment, q),
            (payload, sums),
            (sums,),
        ),
        "mx_decompress_accumulate_recompress": (
            lambda: ops.decompress_accumulate_recompress(payload, values, both, q, out),
            (payload, values),
            (out,),
        ),
    }[case.kernel]
    return Prepared(run, values, read, written)
