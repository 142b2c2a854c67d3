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
from dynamiq.core.randomness import Stream
from dynamiq.kernels.operands import Bucket, Result, Values
from dynamiq.kernels.wire import (
    GROUP,
    GROUPS,
    SCALE_BYTES,
    SUPERGROUP,
    Address,
    Quantizer,
    Run,
    Tiles,
    code_bytes,
    runs,
)

_BATCH = 512
"""Supergroups quantised at once: their temporaries stay in cache."""
_HUGE = 2.0**50
_TINY = 2.0**-50
_LARGEST = 2.0**119


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


def compress(
    values: Values, tiles: Tiles, quantizer: Quantizer, address: Address, out: Tensor
) -> None:
    """Write the payload of partial sums.

    Magnitudes beyond 2¹¹⁹, and NaN, count as 2¹¹⁹; supergroups of 16 bits keep what BF16 can hold.

    Args:
        values: The partial sums.
        tiles: Widths and places.
        quantizer: Levels and roundings.
        address: What the random numbers belong to.
        out: uint8[tiles.nbytes], written in full.
    """
    out.zero_()
    for index, (width, places) in enumerate(runs(tiles, quantizer.widths).items()):
        for batch in _batches(places):
            units = _units(tiles, batch)
            x = _read(values, batch, units)
            if width == 16:
                words = randomness.words(_private(address, Stream.ENTRY), units)
                codes = randomness.stochastic_bfloat16(x, words).view(torch.uint8)
                _scatter(out, batch, codes, "codes")
                continue
            codes, group_codes, scales = _quantize(x, units, width, index, quantizer, address)
            _scatter(out, batch, codes, "codes")
            _scatter(out, batch, group_codes, "group_scales")
            _scatter(out, batch, scales.view(torch.uint8).view(-1, SCALE_BYTES), "scales")


def decompress(payload: Tensor, result: Result, tiles: Tiles, quantizer: Quantizer) -> None:
    """Write the result of a finished chunk; supergroups of 0 bits decode to zeros."""
    for run, decoded in _decoded(payload, tiles, quantizer):
        _write(result, tiles.units[run.tile, run.start : run.stop], decoded)
    for units, cuts in zip(tiles.units, tiles.cuts[:, 0].tolist(), strict=True):
        rest = units[cuts:]
        rest = rest[rest >= 0]
        _write(result, rest, torch.zeros(len(rest), SUPERGROUP, device=rest.device))


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
    address: Address,
    out: Tensor,
) -> None:
    """Write the payload of values + payload; ``tiles`` are the incoming and the outgoing ones.

    The sums themselves are not kept.
    """
    incoming, outgoing = tiles
    sums = torch.empty(*incoming.units.shape, SUPERGROUP, device=payload.device)
    decompress_accumulate(payload, values, sums, incoming, quantizer)
    compress(replace(values, sums=sums), outgoing, quantizer, address, out)


def store(values: Values, units: Tensor, result: Result) -> None:
    """Write the result of partial sums as they are; units: int64[t, s] are those of their tiles."""
    held = units >= 0
    sums = _own(values, units[held]) if values.sums is None else values.sums[held]
    _write(result, units[held], sums)


def gather(values: Values, units: Tensor) -> Tensor:
    """Return own supergroups in range and in the order of units: float32[t, s, 256]."""
    held = units >= 0
    rows = torch.zeros(*units.shape, SUPERGROUP, device=units.device)
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
    energy = _tree_sum(y * y).double() / undo / undo
    saturated = energy.clamp(2.0**-126, limit)
    energy = torch.where((energy > 0) & energy.isfinite(), saturated, energy).float()
    mean = (_tree_sum(y) / counts.clamp(min=1)).double() / undo
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
    return torch.where(_entries(values.bucket, units)[1], x, 0.0)


def _read(values: Values, batch: list[Run], units: Tensor) -> Tensor:
    if values.sums is None:
        return _own(values, units)
    return torch.cat([values.sums[r.tile, r.start : r.stop] for r in batch])


def _units(tiles: Tiles, batch: list[Run]) -> Tensor:
    return torch.cat([tiles.units[r.tile, r.start : r.stop] for r in batch])


def _write(result: Result, units: Tensor, sums: Tensor) -> None:
    """Write sums: float32[k, 256] to their places."""
    x = _divide(sums, result.divisor) + result.offset[units, None]
    x = (x / result.factor[units, None]).clamp_(-result.limit, result.limit)
    x[result.offset[units].isnan()] = torch.nan
    index, there = _entries(result.bucket, units)
    result.bucket.entries[index[there]] = x[there].to(result.bucket.entries.dtype)


def _divide(x: Tensor, divisor: float) -> Tensor:
    # Not by a Python number: on CUDA torch multiplies by its reciprocal.
    return x / torch.tensor(divisor, dtype=torch.float32, device=x.device)


def _canonical(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x)


def _quantize(
    x: Tensor, units: Tensor, width: int, index: int, quantizer: Quantizer, address: Address
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8[k, 32 width], group codes uint8[k, 16] and scales bfloat16[k]."""
    magnitude = x.abs().nan_to_num_(nan=_LARGEST, posinf=_LARGEST).clamp_(max=_LARGEST)
    group_max = magnitude.view(-1, GROUPS, GROUP).amax(2)
    scale = _round_up_to_bfloat16(group_max.amax(1))
    group_codes, divisor = _group_scales(group_max, scale, units, quantizer, address)
    # An all-zero group has divisor 0: its entries are 0 / 1.
    divisor = torch.where(divisor > 0, divisor, 1.0)
    ratio = magnitude.view(-1, GROUPS, GROUP).div_(divisor[:, :, None]).clamp_(max=1.0)
    ratio = ratio.view(-1, SUPERGROUP)
    negative = x < 0
    if width == 1:
        signed = torch.where(negative, -ratio, ratio)
        up = _uniform(units, quantizer, address) < (1.0 + signed) * 0.5
        codes = up.to(torch.int32)
    else:
        levels = _floats(quantizer.levels[index], x.device)
        low, fraction = _below(ratio, levels)
        u = _uniform(units, quantizer, address)
        # In value space, so that correlated errors of opposite signs do not reinforce.
        u = torch.where(negative, 1.0 - u, u)
        magnitude_index = low + (u < fraction)
        top = levels.numel() - 1
        codes = torch.where(negative, top - magnitude_index, top + magnitude_index)
    return _pack(codes, width), group_codes, scale.to(torch.bfloat16)


def _below(ratio: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the level index at or below each ratio (int32) and the fraction of the way up."""
    top = levels.numel() - 1
    if top == 1:
        return torch.zeros_like(ratio, dtype=torch.int32), ratio
    low = torch.bucketize(ratio, levels[1:-1], right=True, out_int32=True)
    gaps = levels[1:] - levels[:-1]
    flat = low.view(-1)
    base = levels.index_select(0, flat).view_as(ratio)
    gap = gaps.index_select(0, flat).view_as(ratio)
    return low, (ratio - base) / gap


def _group_scales(
    group_max: Tensor, scale: Tensor, units: Tensor, quantizer: Quantizer, address: Address
) -> tuple[Tensor, Tensor]:
    """Return the group codes uint8[k, 16] and what entries are divided by, float32[k, 16].

    "stochastic" (the paper): entries are coded against the true maximum of the group; unbiased,
    since the two roundings are independent. "up": coded against the decoded scale, which is never
    below the maximum by more than a rounding.
    """
    ratio = 255.0 * group_max / torch.where(scale > 0, scale, 1.0)[:, None]
    if quantizer.scale_rounding == "up":
        codes = torch.where(group_max > 0, ratio.ceil().clamp(1.0, 255.0), 0.0)
        return codes.to(torch.uint8), _group_scale(codes, scale)
    words = randomness.words(_private(address, Stream.GROUP_SCALE), units, GROUPS)
    low = ratio.floor()
    codes = low + (randomness.uniform(words) < ratio - low)
    return codes.to(torch.uint8), group_max


def _group_scale(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the decoded group scales float32[k, 16]; scale x code is exact in float32."""
    return _divide(scale[:, None] * codes, 255.0)


def _uniform(units: Tensor, quantizer: Quantizer, address: Address) -> Tensor:
    """Return the rounding thresholds float32[k, 256] in (0, 1)."""
    if quantizer.rounding == "nearest":
        return _floats((0.5,), units.device).expand(units.numel(), SUPERGROUP)
    private = randomness.uniform(randomness.words(_private(address, Stream.ENTRY), units))
    if quantizer.rounding == "stochastic":
        return private
    # DynamiQ §3.3: one stratum of width 1/n for each rank, dealt anew for every entry.
    stratum = _stratum(units, address)
    u = _divide(stratum + private, address.world_size)
    return u.clamp_(2.0**-24, 1.0 - 2.0**-24)


def _stratum(units: Tensor, address: Address) -> Tensor:
    """Return the sender's place int32[k, 256] in a random permutation of the ranks per entry.

    Ranks are inserted one after the other, rank j at a uniform place among 0 to j; every later
    rank inserted at or before the sender's place moves it up by one. The random numbers are the
    same for all senders and hops, so the places are all different. O(n) per entry.
    """
    sender, n = address.sender, address.world_size
    place = torch.zeros((), dtype=torch.int32, device=units.device)
    words = place
    for rank in range(sender, n):
        if rank == sender or rank % 2 == 0:
            key = randomness.key(address.seed, address.call, Stream.STRATUM, rank // 2)
            words = randomness.words(key, units)
        half = words if rank % 2 == 0 else words >> 16
        inserted = (half.bitwise_and(0xFFFF) * (rank + 1)) >> 16
        place = inserted if rank == sender else place + (inserted <= place)
    return place


def _private(address: Address, stream: Stream) -> int:
    return randomness.key(address.seed, address.call, stream, address.hop, address.sender)


def _decoded(payload: Tensor, tiles: Tiles, quantizer: Quantizer) -> Iterator[tuple[Run, Tensor]]:
    """Yield every run with its values float32[run, 256]."""
    for index, (width, places) in enumerate(runs(tiles, quantizer.widths).items()):
        for batch in _batches(places):
            codes = _gather(payload, batch, "codes", code_bytes(width))
            if width == 16:
                x = codes.view(torch.bfloat16).float()
            else:
                scale = _gather(payload, batch, "scales", SCALE_BYTES).view(torch.bfloat16)
                group_codes = _gather(payload, batch, "group_scales", GROUPS).float()
                group_scale = _group_scale(group_codes, scale.view(-1).float())
                table = _signed_levels(quantizer.levels[index], width, payload.device)
                x = table.index_select(0, _unpack(codes, width).reshape(-1))
                x = x.view(-1, GROUPS, GROUP).mul_(group_scale[:, :, None]).view(-1, SUPERGROUP)
            yield from zip(batch, x.split([r.stop - r.start for r in batch]), strict=True)


def _signed_levels(levels: tuple[float, ...], width: int, device: torch.device) -> Tensor:
    """Return the value of each of the 2^width codes; the last, unused one repeats the largest."""
    if width == 1:
        return _floats((-1.0, 1.0), device)
    negative = [-level for level in reversed(levels[1:])]
    return _floats((*negative, *levels, levels[-1]), device)


def _floats(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def _pack(codes: Tensor, width: int) -> Tensor:
    """Pack int32[k, 256] codes below 2^width into uint8[k, 32 width], lowest bits first."""
    if 8 % width == 0:
        parts = codes.to(torch.uint8).view(codes.shape[0], -1, 8 // width)
        shifts = width
    else:
        bits = codes[:, :, None] >> torch.arange(width, device=codes.device)
        parts = bits.bitwise_and_(1).to(torch.uint8).view(codes.shape[0], -1, 8)
        shifts = 1
    packed = parts[:, :, 0].clone()
    for i in range(1, parts.shape[2]):
        packed |= parts[:, :, i] << (i * shifts)
    return packed


def _unpack(packed: Tensor, width: int) -> Tensor:
    """Undo :func:`_pack`: int32[k, 256]."""
    shifts = width if 8 % width == 0 else 1
    mask = (1 << shifts) - 1
    parts = [(packed >> (i * shifts)).bitwise_and_(mask) for i in range(8 // shifts)]
    codes = torch.stack(parts, dim=2).view(packed.shape[0], SUPERGROUP, -1).int()
    for i in range(1, codes.shape[2]):
        codes[:, :, 0] |= codes[:, :, i] << i
    return codes[:, :, 0]


def _round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Round float32[k] from 0 to 2^119 up to bfloat16."""
    return (x.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)


def _tree_sum(x: Tensor) -> Tensor:
    """Sum float32[k, 256] over a binary tree: entry i and i + 128 first, then i + 64, ..."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


def _batches(items: list[Run]) -> list[list[Run]]:
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
            batches[-1].append(run.part(start, stop))
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
    return torch.cat(parts).view(-1, size)
