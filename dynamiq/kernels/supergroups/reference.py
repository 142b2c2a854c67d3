"""The operations in plain torch, written to be read: the specification of every other build.

Kernel-shaped: one supergroup is 256 entries in 16 groups; sums follow a written tree; only +, -,
x, ÷, comparisons and integer operations, each rounded to nearest in float32, so that a kernel can
give the same bits. Formulas: DynamiQ §3.3.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.arithmetic import divide, rounded, tree_sum
from dynamiq.core.randomness import Stream
from dynamiq.kernels.supergroups.operands import Bucket, Result, Values
from dynamiq.kernels.supergroups.quantization import dequantize, private_key, quantize
from dynamiq.kernels.supergroups.rotation import rotate, rotate_back
from dynamiq.kernels.supergroups.wire import (
    SCALE_BYTES,
    SUPERGROUP,
    Quantizer,
    Run,
    Tiles,
    code_bytes,
    group_scale_bytes,
    part,
    runs,
)

_BATCH = 512
"""Supergroups quantised at once: their temporaries stay in cache."""
_HUGE = 2.0**50
_TINY = 2.0**-50


def statistics(bucket: Bucket, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the energy and the mean of every supergroup of the padded bucket.

    Args:
        bucket: The entries.
        world_size: Ranks n whose values will be summed.

    Returns:
        Energy Σx² and mean, float32[n * p] each. A finite, non-zero energy saturates to [2⁻¹²⁶,
        2¹²⁶/n] and a mean to ±2¹²⁶/n: so a sum over ranks is zero iff all entries are zero, and
        non-finite iff some entry is. Squares are taken after scaling by 2^±100. Empty supergroups
        have energy and mean 0.
    """
    limit = 2.0**126 / world_size
    units = torch.arange((len(bucket.slices) - 1) * bucket.positions, device=bucket.entries.device)
    parts = [_statistics(bucket, batch, limit) for batch in units.split(_BATCH)]
    energy, mean = zip(*parts, strict=True)
    return torch.cat(energy), torch.cat(mean)


def compress(values: Values, tiles: Tiles, quantizer: Quantizer, out: Tensor) -> None:
    """Write the payload of partial sums.

    Magnitudes beyond 2¹¹⁹, and NaN, count as 2¹¹⁹; supergroups of 16 bits keep what BF16 can hold.

    Args:
        values: The partial sums.
        tiles: Widths, places, and what the random numbers belong to.
        quantizer: Levels and roundings.
        out: uint8[tiles.nbytes], written in full.
    """
    out.zero_()
    for index, (width, places) in enumerate(runs(tiles, quantizer).items()):
        for batch in _batches(places, quantizer):
            units = _units(tiles, batch)
            x = _read(values, batch, units)
            if width == 16:
                words = randomness.words(private_key(tiles.address, Stream.ENTRY), units)
                codes = randomness.stochastic_bfloat16(x, words).view(torch.uint8)
                _scatter(out, batch, codes, "codes")
                continue
            codes, group_codes, scales = quantize(x, units, index, quantizer, tiles.address)
            _scatter(out, batch, codes, "codes")
            if group_codes is not None:
                _scatter(out, batch, group_codes, "group_scales")
            _scatter(out, batch, scales.view(torch.uint8).view(-1, SCALE_BYTES), "scales")


def decompress(payload: Tensor, result: Result, tiles: Tiles, quantizer: Quantizer) -> None:
    """Write the result of a finished chunk; supergroups of 0 bits decode to zeros."""
    for run, decoded in _decoded(payload, tiles, quantizer):
        _write(result, tiles.units[run.tile, run.start : run.stop], decoded)
    for units, cuts in zip(tiles.units, tiles.cuts[:, 0].tolist(), strict=True):
        rest = units[cuts:]
        rest = rest[rest >= 0]
        _write(
            result,
            rest,
            torch.zeros(len(rest), SUPERGROUP, dtype=torch.float32, device=rest.device),
        )


def decompress_accumulate(
    payload: Tensor, values: Values, sums: Tensor, tiles: Tiles, quantizer: Quantizer
) -> None:
    """Write values + payload to sums: float32[t, s, 256]; 0 bits add nothing."""
    sums.copy_(gather(values, tiles.units) if values.sums is None else values.sums)
    for run, decoded in _decoded(payload, tiles, quantizer):
        sums[run.tile, run.start : run.stop] += decoded


def decompress_accumulate_recompress(
    payload: Tensor,
    values: Values,
    tiles: tuple[Tiles, Tiles],
    quantizer: Quantizer,
    out: Tensor,
) -> None:
    """Write the payload of values + payload; ``tiles`` are the incoming and the outgoing ones.

    The sums themselves are not kept.
    """
    incoming, outgoing = tiles
    shape = (*incoming.units.shape, SUPERGROUP)
    sums = torch.empty(shape, dtype=torch.float32, device=payload.device)
    decompress_accumulate(payload, values, sums, incoming, quantizer)
    compress(replace(values, sums=sums), outgoing, quantizer, out)


def store(values: Values, units: Tensor, result: Result) -> None:
    """Write the result of partial sums as they are; units: int64[t, s] are those of their tiles."""
    held = units >= 0
    sums = _own(values, units[held]) if values.sums is None else values.sums[held]
    _write(result, units[held], sums)


def gather(values: Values, units: Tensor) -> Tensor:
    """Return own supergroups in range and in the order of units: float32[t, s, 256]."""
    held = units >= 0
    rows = torch.zeros(*units.shape, SUPERGROUP, dtype=torch.float32, device=units.device)
    rows[held] = _own(values, units[held])
    return rows


def _statistics(bucket: Bucket, units: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    counts = _extents(bucket, units)[1]
    x = _rows(bucket, units)
    largest = x.abs().amax(1)
    factor = torch.ones_like(largest)
    factor[largest >= _HUGE] = 2.0**-100
    factor[largest < _TINY] = 2.0**100
    y = x * factor[:, None]
    undo = factor.double()
    energy = tree_sum(y * y).double() / undo / undo
    saturated = energy.clamp(2.0**-126, limit)
    energy = torch.where((energy > 0) & energy.isfinite(), saturated, energy).float()
    mean = (tree_sum(y) / counts.clamp(min=1)).double() / undo
    mean = mean.clamp(-limit, limit).float()
    return _canonical(energy), _canonical(mean)


def _extents(bucket: Bucket, units: Tensor) -> tuple[Tensor, Tensor]:
    """Return where supergroups begin in the bucket's entries, and how many entries they have."""
    chunk = units // bucket.positions
    begin = bucket.slices[chunk] + units % bucket.positions * SUPERGROUP
    count = (bucket.slices[chunk + 1] - begin).clamp(0, SUPERGROUP)
    return begin - bucket.origin, count


def _rows(bucket: Bucket, units: Tensor) -> Tensor:
    """Return supergroups as float32[k, 256], zeros beyond their last entry."""
    index, there = _entries(bucket, units)
    return torch.where(there, bucket.entries[index].float(), 0.0)


def _entries(bucket: Bucket, units: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index int64[k, 256] of every entry, 0 where ``there`` is False."""
    begin, count = _extents(bucket, units)
    entry = torch.arange(SUPERGROUP, device=units.device)
    there = entry < count[:, None]
    return torch.where(there, begin[:, None] + entry, 0), there


def _own(values: Values, units: Tensor) -> Tensor:
    """Return this rank's own supergroups in range, float32[k, 256]."""
    x = _rows(values.bucket, units) * values.factor[units, None] - values.shift[units, None]
    x = torch.where(_entries(values.bucket, units)[1], x, 0.0)
    return x if values.signs is None else rotate(x, units, values.signs)


def _read(values: Values, batch: list[Run], units: Tensor) -> Tensor:
    if values.sums is None:
        return _own(values, units)
    return torch.cat([values.sums[r.tile, r.start : r.stop] for r in batch])


def _units(tiles: Tiles, batch: list[Run]) -> Tensor:
    return torch.cat([tiles.units[r.tile, r.start : r.stop] for r in batch])


def _write(result: Result, units: Tensor, sums: Tensor) -> None:
    """Write sums: float32[k, 256] to their places."""
    if result.signs is not None:
        sums = rotate_back(sums, units, result.signs)
    x = divide(sums, result.divisor) + result.offset[units, None]
    x = (x / result.factor[units, None]).clamp_(-result.limit, result.limit)
    x = _canonical(x)
    index, there = _entries(result.bucket, units)
    result.bucket.entries[index[there]] = rounded(x[there], result.bucket.entries.dtype)


def _canonical(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x)


def _decoded(payload: Tensor, tiles: Tiles, quantizer: Quantizer) -> Iterator[tuple[Run, Tensor]]:
    """Yield every run with its values float32[run, 256]."""
    group_bytes = group_scale_bytes(quantizer.group_scales)
    for index, (width, places) in enumerate(runs(tiles, quantizer).items()):
        for batch in _batches(places, quantizer):
            codes = _gather(payload, batch, "codes", code_bytes(width))
            if width == 16:
                x = codes.view(torch.bfloat16).float()
            else:
                scale = _gather(payload, batch, "scales", SCALE_BYTES).view(torch.bfloat16)
                group_codes = _gather(payload, batch, "group_scales", group_bytes)
                coded = (codes, group_codes, scale.view(-1).float())
                x = dequantize(coded, _units(tiles, batch), index, quantizer, tiles.address)
            yield from zip(batch, x.split([r.stop - r.start for r in batch]), strict=True)


def _batches(items: list[Run], quantizer: Quantizer) -> list[list[Run]]:
    """Group runs into batches of about ``_BATCH`` supergroups, cutting long runs."""
    batches: list[list[Run]] = []
    room = 0
    for run in items:
        start = run.start
        while start < run.stop:
            if room == 0:
                batches.append([])
                room = _BATCH
            stop = min(run.stop, start + room)
            batches[-1].append(part(run, start, stop, quantizer.group_scales))
            room -= stop - start
            start = stop
    return batches


def _scatter(out: Tensor, batch: list[Run], rows: Tensor, place: str) -> None:
    """Write rows uint8[k, m] to the runs' byte ranges."""
    row = 0
    for run in batch:
        count = run.stop - run.start
        offset = getattr(run, place)
        piece = rows[row : row + count]
        out[offset : offset + piece.numel()] = piece.reshape(-1)
        row += count


def _gather(payload: Tensor, batch: list[Run], place: str, size: int) -> Tensor:
    """Return rows uint8[k, size] from the runs' byte ranges."""
    parts = [
        payload[getattr(r, place) : getattr(r, place) + (r.stop - r.start) * size] for r in batch
    ]
    return torch.cat(parts).view(sum(r.stop - r.start for r in batch), size)
