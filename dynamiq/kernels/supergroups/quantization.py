"""Values to codes, as the reference does it: scales, levels, roundings and the packing of bits.

Formulas: DynamiQ §3.3. Only +, -, x, ÷, comparisons and integer operations, each rounded to nearest
in float32.
"""

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.arithmetic import divide
from dynamiq.core.randomness import Stream
from dynamiq.kernels.supergroups.dither import dithered_codes, dithered_values
from dynamiq.kernels.supergroups.tables import signed_levels
from dynamiq.kernels.supergroups.wire import GROUP, GROUPS, SUPERGROUP, Address, Quantizer

_LARGEST = 2.0**119


def quantize(
    x: Tensor, units: Tensor, index: int, quantizer: Quantizer, address: Address
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return codes uint8[k, 32 width], group codes uint8[k, 16] if any, and scales bfloat16[k].

    ``index`` is that of the width among those of the quantiser.
    """
    width = quantizer.widths[index]
    magnitude = x.abs().nan_to_num_(nan=_LARGEST, posinf=_LARGEST).clamp_(max=_LARGEST)
    group_max = magnitude.view(-1, GROUPS, GROUP).amax(2)
    scale = round_up_to_bfloat16(group_max.amax(1))
    group_codes, divisor = _group_scales(group_max, scale, units, quantizer, address)
    # An all-zero group has divisor 0: its entries are 0 / 1.
    divisor = torch.where(divisor > 0, divisor, 1.0)
    ratio = magnitude.view(-1, GROUPS, GROUP).div_(divisor[:, :, None]).clamp_(max=1.0)
    ratio = ratio.view(-1, SUPERGROUP)
    negative = x < 0
    u = _uniform(units, quantizer, address)
    if quantizer.rounding == "dithered":
        codes = dithered_codes(torch.where(negative, -ratio, ratio), u, width)
    elif width == 1:
        signed = torch.where(negative, -ratio, ratio)
        codes = (u < (1.0 + signed) * 0.5).to(torch.int32)
    else:
        levels = _floats(quantizer.levels[index], x.device)
        low, fraction = _below(ratio, levels)
        # In value space, so that correlated errors of opposite signs do not reinforce.
        u = torch.where(negative, 1.0 - u, u)
        magnitude_index = low + (u < fraction)
        top = levels.numel() - 1
        codes = torch.where(negative, top - magnitude_index, top + magnitude_index)
    return _pack(codes, width), group_codes, scale.to(torch.bfloat16)


def dequantize(
    coded: tuple[Tensor, Tensor, Tensor],
    units: Tensor,
    index: int,
    quantizer: Quantizer,
    address: Address,
) -> Tensor:
    """Return float32[k, 256] of packed codes, group codes uint8[k, 16 or 0] and scales float32[k].

    ``index`` is that of the width among those of the quantiser.
    """
    packed, group_codes, scale = coded
    width = quantizer.widths[index]
    codes = unpack(packed, width)
    if quantizer.rounding == "dithered":
        x = dithered_values(codes, _uniform(units, quantizer, address), width)
    else:
        table = signed_levels(quantizer.levels[index], width).to(packed.device)
        x = table.index_select(0, codes.reshape(-1)).view(-1, SUPERGROUP)
    if quantizer.group_scales is None:
        return x.mul_(scale[:, None])
    group_scale = decoded_group_scale(group_codes.float(), scale)
    return x.view(-1, GROUPS, GROUP).mul_(group_scale[:, :, None]).view(-1, SUPERGROUP)


def decoded_group_scale(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the decoded group scales float32[k, 16]; scale x code is exact in float32."""
    return divide(scale[:, None] * codes, 255.0)


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


def unpack(packed: Tensor, width: int) -> Tensor:
    """Undo :func:`_pack`: int32[k, 256]."""
    shifts = width if 8 % width == 0 else 1
    mask = (1 << shifts) - 1
    parts = [(packed >> (i * shifts)).bitwise_and_(mask) for i in range(8 // shifts)]
    codes = torch.stack(parts, dim=2).view(packed.shape[0], SUPERGROUP, -1).int()
    for i in range(1, codes.shape[2]):
        codes[:, :, 0] |= codes[:, :, i] << i
    return codes[:, :, 0]


def private_key(address: Address, stream: Stream) -> int:
    """Return the key of the words of one sender of one message."""
    return randomness.key(address.seed, address.call, stream, address.hop, address.sender)


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
) -> tuple[Tensor | None, Tensor]:
    """Return the group codes uint8[k, 16] and what entries are divided by, float32[k, 16 or 1].

    "stochastic" (the paper): entries are coded against the true maximum of the group; unbiased,
    since the two roundings are independent. "up": coded against the decoded scale, which is never
    below the maximum by more than a rounding.
    """
    if quantizer.group_scales is None:
        return None, scale[:, None]
    ratio = 255.0 * group_max / torch.where(scale > 0, scale, 1.0)[:, None]
    if quantizer.group_scales == "up":
        codes = torch.where(group_max > 0, ratio.ceil().clamp(1.0, 255.0), 0.0)
        return codes.to(torch.uint8), decoded_group_scale(codes, scale)
    words = randomness.words(private_key(address, Stream.GROUP_SCALE), units, GROUPS)
    low = ratio.floor()
    codes = low + (randomness.uniform(words) < ratio - low)
    return codes.to(torch.uint8), group_max


def _uniform(units: Tensor, quantizer: Quantizer, address: Address) -> Tensor:
    """Return the rounding thresholds, or dithers + 1/2, float32[k, 256] in (0, 1)."""
    if quantizer.rounding == "nearest":
        return _floats((0.5,), units.device).expand(units.numel(), SUPERGROUP)
    private = randomness.uniform(randomness.words(private_key(address, Stream.ENTRY), units))
    if quantizer.rounding in {"stochastic", "dithered"}:
        return private
    # DynamiQ §3.3: one stratum of width 1/n for each rank, dealt anew for every entry.
    stratum = _stratum(units, address)
    u = divide(stratum + private, address.world_size)
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


def _floats(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def round_up_to_bfloat16(x: Tensor) -> Tensor:
    """Round float32[k] from 0 to 2^119 up to bfloat16."""
    return (x.view(torch.int32) + 0xFFFF).bitwise_and_(-0x10000).view(torch.float32)
