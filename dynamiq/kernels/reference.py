"""The operations in plain torch, written to be read: the specification of every other build.

Kernel-shaped: one supergroup is 256 entries in 16 groups; sums follow a written tree; only +, -,
x, ÷, comparisons and integer operations, each rounded to nearest in float32, so that a kernel can
give the same bits. Formulas: DynamiQ §3.3.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.randomness import Stream
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
_LARGEST_BFLOAT16_BITS = 0x7F7F0000


def statistics(x: Tensor, counts: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the energy and the mean of every supergroup.

    Args:
        x: float32[s, 256], zeros in the padding.
        counts: int64[s], true entries of each supergroup, at least 1.
        world_size: Ranks n whose values will be summed.

    Returns:
        Energy Σx² and mean, float32[s] each. A finite, non-zero energy saturates to [2⁻¹²⁶,
        2¹²⁶/n] and a mean to ±2¹²⁶/n: so a sum over ranks is zero iff all entries are zero, and
        non-finite iff some entry is. Squares are taken after scaling by 2^±100.
    """
    limit = 2.0**126 / world_size
    largest = x.abs().amax(1)
    factor = torch.ones_like(largest)
    factor[largest >= _HUGE] = 2.0**-100
    factor[largest < _TINY] = 2.0**100
    y = x * factor[:, None]
    undo = factor.double()
    energy = _tree_sum(y * y).double() / undo / undo
    saturated = energy.clamp(2.0**-126, limit)
    energy = torch.where((energy > 0) & energy.isfinite(), saturated, energy)
    mean = (_tree_sum(y) / counts).double() / undo
    return energy.float(), mean.clamp(-limit, limit).float()


def compress(
    values: Tensor, tiles: Tiles, quantizer: Quantizer, address: Address, out: Tensor
) -> None:
    """Write the payload of partial sums.

    Args:
        values: float32[t, s, 256], supergroups in tile order.
        tiles: Widths and places.
        quantizer: Levels and roundings.
        address: What the random numbers belong to.
        out: uint8[bytes], written in full.
    """
    out.zero_()
    for index, (width, places) in enumerate(runs(tiles, quantizer.widths).items()):
        for batch in _batches(places):
            x = torch.cat([values[r.tile, r.start : r.stop] for r in batch])
            units = torch.cat([tiles.units[r.tile, r.start : r.stop] for r in batch])
            if width == 16:
                words = randomness.words(_private(address, Stream.ENTRY), units)
                codes = randomness.stochastic_bfloat16(x, words).view(torch.uint8)
                _scatter(out, batch, codes, "codes")
                continue
            codes, group_codes, scales = _quantize(x, units, width, index, quantizer, address)
            _scatter(out, batch, codes, "codes")
            _scatter(out, batch, group_codes, "group_scales")
            _scatter(out, batch, scales.view(torch.uint8).view(-1, SCALE_BYTES), "scales")


def decompress(payload: Tensor, values: Tensor, tiles: Tiles, quantizer: Quantizer) -> None:
    """Replace values: float32[t, s, 256] by what the payload says; 0 bits decode to zeros."""
    for tile, cuts in enumerate(tiles.cuts.tolist()):
        values[tile, cuts[0] :] = 0.0
    for run, decoded in _decoded(payload, tiles, quantizer):
        values[run.tile, run.start : run.stop] = decoded


def decompress_accumulate(
    payload: Tensor, values: Tensor, tiles: Tiles, quantizer: Quantizer
) -> None:
    """Add what the payload says to values: float32[t, s, 256]; 0 bits add nothing."""
    for run, decoded in _decoded(payload, tiles, quantizer):
        values[run.tile, run.start : run.stop] += decoded


def _quantize(
    x: Tensor, units: Tensor, width: int, index: int, quantizer: Quantizer, address: Address
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes uint8[k, 32 width], group codes uint8[k, 16] and scales bfloat16[k]."""
    magnitude = x.abs()
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
        codes = up.to(torch.uint8)
    else:
        levels = _floats(quantizer.levels[index], x.device)
        low, fraction = _below(ratio, levels)
        u = _uniform(units, quantizer, address)
        # In value space, so that correlated errors of opposite signs do not reinforce.
        u = torch.where(negative, 1.0 - u, u)
        magnitude_index = low + (u < fraction)
        top = levels.numel() - 1
        codes = torch.where(negative, top - magnitude_index, top + magnitude_index)
        codes = codes.to(torch.uint8)
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
    return scale[:, None] * codes / 255.0


def _uniform(units: Tensor, quantizer: Quantizer, address: Address) -> Tensor:
    """Return the rounding thresholds float32[k, 256] in (0, 1)."""
    if quantizer.rounding == "nearest":
        return _floats((0.5,), units.device).expand(units.numel(), SUPERGROUP)
    private = randomness.uniform(randomness.words(_private(address, Stream.ENTRY), units))
    if quantizer.rounding == "stochastic":
        return private
    # DynamiQ §3.3: one stratum of width 1/n for each rank, dealt anew for every entry.
    stratum = _stratum(units, address)
    u = (stratum + private) / address.world_size
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
                x = table.index_select(0, _unpack(codes, width).view(-1).int())
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
    """Pack uint8[k, 256] codes below 2^width into uint8[k, 32 width], lowest bits first."""
    if width == 8:
        return codes
    parts = codes.view(codes.shape[0], -1, 8 // width)
    packed = parts[:, :, 0].clone()
    for i in range(1, 8 // width):
        packed |= parts[:, :, i] << (i * width)
    return packed


def _unpack(packed: Tensor, width: int) -> Tensor:
    """Undo :func:`_pack`."""
    if width == 8:
        return packed
    mask = (1 << width) - 1
    parts = [(packed >> (i * width)).bitwise_and_(mask) for i in range(8 // width)]
    return torch.stack(parts, dim=2).view(packed.shape[0], SUPERGROUP)


def _round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Round non-negative float32[k] up to bfloat16, saturating at its maximum."""
    bits = (x.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000)
    return bits.clamp_(max=_LARGEST_BFLOAT16_BITS).view(torch.float32)


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
