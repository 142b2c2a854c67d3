"""Counter-based randomness: a pure function of where a number is used, with no state.

Every random number is addressed by (seed, call, stream, ...) folded into a 64-bit key, the block
of 256 entries it belongs to, and the entry's lane in that block. Sender and receiver regenerate
it; the order of evaluation, threads, segments and devices do not matter. Integer operations only,
so that kernels can mirror it bit for bit.

The mixers are SplitMix64's finaliser (Steele, Lea and Flood 2014) for keys and blocks, and a
two-multiplication 32-bit finaliser with a key injected halfway for lanes.
"""

from enum import IntEnum

import torch
from torch import Tensor

BLOCK = 256
"""Entries that share one block key."""

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_LANE = 0x9E3779B1
_LANE_MULTIPLY_1 = 0x7FEB352D
_LANE_MULTIPLY_2 = 0x846CA68B

# Bits of float32.
_LARGEST_BFLOAT16 = 0x7F7F0000
_INFINITY = 0x7F800000
_NAN = 0x7FC00000


class Stream(IntEnum):
    """What a random number is for; keeps uses of the same address apart."""

    STATISTICS = 1
    ENTRY = 2
    STRATUM = 3
    GROUP_SCALE = 4
    SIGN = 5
    NODE = 6
    COLUMN = 7


def key(*parts: int) -> int:
    """Fold integers into a 64-bit key, order-sensitive."""
    state = 0
    for part in parts:
        state = _mix64((state + _GOLDEN + (part & _MASK64)) & _MASK64)
    return state


def words(key: int, blocks: Tensor, lanes: int = BLOCK) -> Tensor:
    """Return 32 random bits for every lane of every block.

    Args:
        key: 64-bit key of the stream.
        blocks: int64[k] block indices (entry index // 256).
        lanes: How many lanes of each block, from the first.

    Returns:
        int32[k, lanes], each bit pattern uniform.
    """
    keys = _mix_blocks(key, blocks).view(torch.int32).view(-1, 2)
    lane = torch.arange(lanes, device=blocks.device, dtype=torch.int32) * _signed32(_LANE)
    x = keys[:, :1] + lane
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _LANE_MULTIPLY_1
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x += keys[:, 1:]
    x *= _signed32(_LANE_MULTIPLY_2)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def uniform(words: Tensor) -> Tensor:
    """Turn random words into float32 in (0, 1): (k + 1/2) / 2²³, so that u and 1 - u are exact."""
    return (words >> 9).bitwise_and_(0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)


def stochastic_bfloat16(x: Tensor, words: Tensor) -> Tensor:
    """Round float32 to a neighbouring bfloat16 with probability by distance: unbiased.

    Finite values stay finite (magnitudes beyond bfloat16's maximum saturate); infinities pass
    through, and every NaN becomes the same one.

    Args:
        x: float32[...] values.
        words: int32[...] random words, their upper 16 bits used.

    Returns:
        bfloat16[...].
    """
    bits = x.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + (words >> 16).bitwise_and_(0xFFFF)).bitwise_and_(-0x10000)
    rounded = rounded.clamp_(max=_LARGEST_BFLOAT16)
    rounded = torch.where(magnitude >= _INFINITY, magnitude, rounded)
    rounded |= bits & -0x80000000
    rounded = torch.where(magnitude > _INFINITY, _NAN, rounded)
    return (rounded >> 16).to(torch.int16).view(torch.bfloat16)


def _mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MULTIPLY_1) & _MASK64
    x = ((x ^ (x >> 27)) * _MULTIPLY_2) & _MASK64
    return x ^ (x >> 31)


def _mix_blocks(key: int, blocks: Tensor) -> Tensor:
    """Return int64[k]: ``_mix64(key + (block + 1) * golden)`` in wrapping arithmetic."""
    x = (blocks + 1) * _signed64(_GOLDEN) + _signed64(key)
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _signed64(_MULTIPLY_1)
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _signed64(_MULTIPLY_2)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _signed32(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _signed64(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
