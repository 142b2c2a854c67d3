"""The operations that compressors call: checked, and run by the build that fits the device.

:mod:`dynamiq.kernels.supergroups.reference` specifies what they give; every build gives the same
bits. CPU tensors use the host build, or the reference where there is no C++ compiler; CUDA tensors
use the kernels of their device. Shapes and meanings are those of the reference.

Shapes, types and devices are checked. Indices are trusted: slices, units, cuts and offsets are in
the device's memory, and to look at them would be to wait for it.
"""

from dataclasses import replace

import torch
from torch import Tensor

from dynamiq.core.errors import InputError
from dynamiq.kernels.builds import Run, check_memory, find_build
from dynamiq.kernels.registry import ENTRY_DTYPES
from dynamiq.kernels.supergroups import arguments, reference
from dynamiq.kernels.supergroups.operands import Bucket, Result, Values
from dynamiq.kernels.supergroups.wire import SUPERGROUP, Quantizer, Tiles


def statistics(bucket: Bucket, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the energy and the mean of every supergroup, float32[n * p] each."""
    _check_bucket(bucket)
    device = bucket.entries.device
    count = (len(bucket.slices) - 1) * bucket.positions
    if (run := _build(bucket)) is None:
        return reference.statistics(bucket, world_size)
    energy, mean = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(2))
    limit = 2.0**126 / world_size
    a = arguments.Statistics(arguments.Bucket.of(bucket), energy.data_ptr(), mean.data_ptr(), limit)
    run("statistics", a, count)
    return energy, mean


def compress(values: Values, tiles: Tiles, quantizer: Quantizer, out: Tensor) -> None:
    """Write the payload of partial sums to out: uint8[tiles.nbytes]."""
    _check_values(values, tiles.units)
    _check_tiles(tiles, quantizer, out)
    if (run := _build(values.bucket)) is None:
        reference.compress(values, tiles, quantizer, out)
        return
    a = arguments.Compress(
        arguments.Values.of(values),
        arguments.Tiles.of(tiles),
        arguments.Quantizer.of(quantizer, out.device),
        out.data_ptr(),
    )
    run("compress", a, tiles.units.numel())


def decompress(payload: Tensor, result: Result, tiles: Tiles, quantizer: Quantizer) -> None:
    """Write the result of a finished chunk."""
    _check_result(result)
    _check_units(tiles.units, result.bucket)
    _check_tiles(tiles, quantizer, payload)
    if (run := _build(result.bucket)) is None:
        reference.decompress(payload, result, tiles, quantizer)
        return
    a = arguments.Decompress(
        payload.data_ptr(),
        arguments.Result.of(result),
        arguments.Tiles.of(tiles),
        arguments.Quantizer.of(quantizer, payload.device),
    )
    run("decompress", a, tiles.units.numel())
    _note_change(result)


def decompress_accumulate(
    payload: Tensor, values: Values, sums: Tensor, tiles: Tiles, quantizer: Quantizer
) -> None:
    """Write values + payload to sums: float32[t, s, 256], which may be those of the values."""
    _check_values(values, tiles.units)
    _check_sums(sums, tiles.units)
    _check_tiles(tiles, quantizer, payload)
    if (run := _build(values.bucket)) is None:
        reference.decompress_accumulate(payload, values, sums, tiles, quantizer)
        return
    a = arguments.DecompressAccumulate(
        payload.data_ptr(),
        arguments.Values.of(values),
        sums.data_ptr(),
        arguments.Tiles.of(tiles),
        arguments.Quantizer.of(quantizer, payload.device),
    )
    run("decompress_accumulate", a, tiles.units.numel())


def decompress_accumulate_recompress(
    payload: Tensor,
    values: Values,
    tiles: tuple[Tiles, Tiles],
    quantizer: Quantizer,
    out: Tensor,
) -> None:
    """Write the payload of values + payload; ``tiles`` are the incoming and the outgoing ones."""
    incoming, outgoing = tiles
    _check_values(values, incoming.units)
    _check_units(outgoing.units, values.bucket)
    _check_tiles(incoming, quantizer, payload)
    _check_tiles(outgoing, quantizer, out)
    if incoming.units.shape != outgoing.units.shape:
        raise InputError(
            f"incoming tiles {list(incoming.units.shape)} and outgoing tiles "
            f"{list(outgoing.units.shape)} must hold the same supergroups"
        )
    if (run := _build(values.bucket)) is None:
        reference.decompress_accumulate_recompress(payload, values, tiles, quantizer, out)
        return
    a = arguments.DecompressAccumulateRecompress(
        payload.data_ptr(),
        arguments.Values.of(values),
        arguments.Tiles.of(incoming),
        arguments.Tiles.of(outgoing),
        arguments.Quantizer.of(quantizer, payload.device),
        out.data_ptr(),
    )
    run("decompress_accumulate_recompress", a, incoming.units.numel())


def store(values: Values, units: Tensor, result: Result) -> None:
    """Write the result of partial sums as they are; units: int64[t, s] are those of their tiles."""
    _check_values(values, units)
    _check_result(result)
    _check_units(units, result.bucket)
    if (run := _build(result.bucket)) is None:
        reference.store(values, units, result)
        return
    if values.sums is None and values.bucket.entries.dtype != result.bucket.entries.dtype:
        # A kernel knows one entry format.
        values = replace(values, sums=reference.gather(values, units))
    a = arguments.Store(arguments.Values.of(values), units.data_ptr(), arguments.Result.of(result))
    run("store", a, units.numel())
    _note_change(result)


def _build(bucket: Bucket) -> Run | None:
    """Return what runs kernels for a bucket; None for the reference."""
    entries = bucket.entries
    return find_build("supergroups", entries.dtype, entries.device)


def _note_change(result: Result) -> None:
    """Tell autograd, which may hold the entries for a backward, that they were written."""
    entries = result.bucket.entries
    if not entries.is_inference():
        torch.autograd.graph.increment_version(entries)


def _check_bucket(bucket: Bucket) -> None:
    device = bucket.entries.device
    if device.type not in {"cpu", "cuda"}:
        raise InputError(f"kernels run on cpu and cuda, got a bucket on {device}")
    check_memory("a bucket", bucket.entries, tuple(ENTRY_DTYPES), device)
    check_memory("slices", bucket.slices, (torch.int64,), device)
    if bucket.entries.dim() != 1 or bucket.slices.dim() != 1 or not len(bucket.slices):
        raise InputError(
            f"a bucket has flat entries and slices[n + 1], got {list(bucket.entries.shape)} and "
            f"{list(bucket.slices.shape)}"
        )


def _check_of_supergroups(bucket: Bucket, **tensors: Tensor) -> None:
    count = (len(bucket.slices) - 1) * bucket.positions
    for name, tensor in tensors.items():
        check_memory(name, tensor, (torch.float32,), bucket.entries.device)
        if tensor.shape != (count,):
            raise InputError(
                f"{name} has one number for each of {count} supergroups, got {list(tensor.shape)}"
            )


def _check_values(values: Values, units: Tensor) -> None:
    _check_bucket(values.bucket)
    _check_of_supergroups(values.bucket, factor=values.factor, shift=values.shift)
    _check_units(units, values.bucket)
    if values.sums is not None:
        _check_sums(values.sums, units)


def _check_result(result: Result) -> None:
    _check_bucket(result.bucket)
    _check_of_supergroups(result.bucket, factor=result.factor, offset=result.offset)


def _check_units(units: Tensor, bucket: Bucket) -> None:
    check_memory("the units of tiles", units, (torch.int64,), bucket.entries.device)
    if units.dim() != 2:
        raise InputError(f"the units of tiles are int64[t, s], got {list(units.shape)}")


def _check_sums(sums: Tensor, units: Tensor) -> None:
    check_memory("sums", sums, (torch.float32,), units.device)
    if sums.shape != (*units.shape, SUPERGROUP):
        raise InputError(
            f"sums are float32{[*units.shape, SUPERGROUP]} for these tiles, got {list(sums.shape)}"
        )
    if sums.data_ptr() % 16:
        raise InputError("the memory of sums must be aligned to 16 bytes; clone them")


def _check_tiles(tiles: Tiles, quantizer: Quantizer, payload: Tensor) -> None:
    check_memory("a payload", payload, (torch.uint8,), tiles.units.device)
    for name in ("cuts", "offsets"):
        check_memory(name, getattr(tiles, name), (torch.int64,), payload.device)
    count = tiles.units.shape[0]
    if payload.shape != (tiles.nbytes,) or payload.data_ptr() % 2:
        raise InputError(
            f"these tiles have a payload of {tiles.nbytes} bytes at an even address, got "
            f"{list(payload.shape)} bytes at {payload.data_ptr():#x}"
        )
    if tiles.cuts.shape != (count, len(quantizer.widths)) or tiles.offsets.shape != (count + 1,):
        raise InputError(
            f"{count} tiles of {len(quantizer.widths)} widths need cuts of {count} rows and "
            f"{count + 1} offsets, got {list(tiles.cuts.shape)} and {list(tiles.offsets.shape)}"
        )
