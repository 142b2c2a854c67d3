"""The operations that compressors call: checked, and run by the build that fits the device.

:mod:`dynamiq.kernels.mx.reference` specifies what they give; every build gives the same bits.
CPU tensors use the host build, or the reference where there is no C++ compiler; CUDA tensors use
the kernels of their device. Shapes and meanings are those of the reference.
"""

import torch
from torch import Tensor

from dynamiq.core.errors import InputError
from dynamiq.kernels.builds import Run, check_memory, find_build
from dynamiq.kernels.mx import arguments, reference
from dynamiq.kernels.mx.wire import BLOCK, BLOCKS, SUPERGROUP, Quantizer, Segment, payload_bytes


def compress(values: Tensor, segment: Segment, quantizer: Quantizer, out: Tensor) -> None:
    """Write the payload of float32[s, 256] to out: uint8[blocks * (block_bytes + 1)]."""
    _check(values, segment)
    _check_payload(out, values, segment, quantizer)
    if (run := _build(values)) is None:
        reference.compress(values, segment, quantizer, out)
        return
    a = arguments.MxCompress(
        arguments.Segment.of(segment, values), arguments.Quantizer.of(quantizer), out.data_ptr()
    )
    run("mx_compress", a, segment.supergroups)


def decompress(payload: Tensor, values: Tensor, segment: Segment, quantizer: Quantizer) -> None:
    """Replace the blocks of float32[s, 256] that the payload holds."""
    _check(values, segment)
    _check_payload(payload, values, segment, quantizer)
    if (run := _build(values)) is None:
        reference.decompress(payload, values, segment, quantizer)
        return
    a = arguments.MxDecompress(
        payload.data_ptr(),
        arguments.Segment.of(segment, values),
        arguments.Quantizer.of(quantizer),
    )
    run("mx_decompress", a, segment.supergroups)


def decompress_accumulate(
    payload: Tensor, values: Tensor, segment: Segment, quantizer: Quantizer
) -> None:
    """Add the payload's blocks to those of float32[s, 256]."""
    _check(values, segment)
    _check_payload(payload, values, segment, quantizer)
    if (run := _build(values)) is None:
        reference.decompress_accumulate(payload, values, segment, quantizer)
        return
    a = arguments.MxDecompressAccumulate(
        payload.data_ptr(),
        arguments.Segment.of(segment, values),
        arguments.Quantizer.of(quantizer),
    )
    run("mx_decompress_accumulate", a, segment.supergroups)


def decompress_accumulate_recompress(
    payload: Tensor,
    values: Tensor,
    segments: tuple[Segment, Segment],
    quantizer: Quantizer,
    out: Tensor,
) -> None:
    """Write the payload of values + payload; the segments are the incoming and the outgoing one."""
    incoming, outgoing = segments
    for segment, memory in ((incoming, payload), (outgoing, out)):
        _check(values, segment)
        _check_payload(memory, values, segment, quantizer)
    if (incoming.blocks, incoming.first) != (outgoing.blocks, outgoing.first):
        raise InputError(
            f"the incoming {incoming.blocks} blocks from supergroup {incoming.first} and the "
            f"outgoing {outgoing.blocks} from {outgoing.first} must be the same blocks"
        )
    if (run := _build(values)) is None:
        reference.decompress_accumulate_recompress(payload, values, segments, quantizer, out)
        return
    a = arguments.MxDecompressAccumulateRecompress(
        payload.data_ptr(),
        arguments.Segment.of(incoming, values),
        arguments.Segment.of(outgoing, values),
        arguments.Quantizer.of(quantizer),
        out.data_ptr(),
    )
    run("mx_decompress_accumulate_recompress", a, incoming.supergroups)


def _build(values: Tensor) -> Run | None:
    """Return what runs kernels on values; None for the reference."""
    return find_build("mx", values.dtype, values.device)


def _check(values: Tensor, segment: Segment) -> None:
    device = values.device
    if device.type not in {"cpu", "cuda"}:
        raise InputError(f"kernels run on cpu and cuda, got values on {device}")
    check_memory("values", values, (torch.float32,), device)
    if values.shape != (segment.supergroups, SUPERGROUP) or values.data_ptr() % 16:
        raise InputError(
            f"{segment.blocks} blocks of {BLOCK} are float32[{segment.supergroups}, {SUPERGROUP}] "
            f"in memory aligned to 16 bytes, got {list(values.shape)} at {values.data_ptr():#x}"
        )
    if segment.scales is None:
        return
    check_memory("scales", segment.scales, (torch.uint8,), device)
    if segment.scales.shape != (BLOCKS * segment.supergroups,):
        raise InputError(
            f"{segment.supergroups} supergroups have {BLOCKS} scales each, got "
            f"{list(segment.scales.shape)}"
        )


def _check_payload(payload: Tensor, values: Tensor, segment: Segment, quantizer: Quantizer) -> None:
    check_memory("a payload", payload, (torch.uint8,), values.device)
    nbytes = payload_bytes(quantizer.element, BLOCK * segment.blocks)
    if payload.shape != (nbytes,) or payload.data_ptr() % 16:
        raise InputError(
            f"these blocks have a payload of {nbytes} bytes in memory aligned to 16 bytes, got "
            f"{list(payload.shape)} bytes at {payload.data_ptr():#x}"
        )
