"""The operations in plain torch, written to be read: the specification of every other build.

Only +, -, x, ÷, comparisons and integer operations, each rounded to nearest in float32 (energies
in float64), in a written order.
"""

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.arithmetic import divide, rounded, tree_sum
from dynamiq.kernels.hadamard.operands import (
    LOG_UNIT,
    UNIT,
    Blocks,
    Finish,
    Quantizer,
    passes,
)

_BATCH = 4096
"""Units whose random numbers or bits are made at once."""
_GROUP = 16
_HUGE, _TINY = 2.0**50, 2.0**-50


def energies(entries: Tensor) -> Tensor:
    """Return Σx² of every 256 entries of entries[d]: float64[⌈d / 256⌉].

    Squares are taken after scaling by 2^±100, so that none overflows or vanishes.
    """
    x = _units(entries, -(-entries.numel() // UNIT))
    largest = x.abs().amax(1)
    factor = torch.ones_like(largest)
    factor[largest >= _HUGE] = 2.0**-100
    factor[largest < _TINY] = 2.0**100
    y = x * factor[:, None]
    undo = factor.double()
    energy = tree_sum(y * y).double() / undo / undo
    return torch.where(energy.isnan(), torch.nan, energy)


def quantize(entries: Tensor, blocks: Blocks, quantizer: Quantizer, codes: Tensor) -> None:
    """Rotate entries[d] and write their integers to codes[blocks.numel].

    Entries beyond the last are zeros. Value v = rotated · scale + g / 2, clamped to [0, g], NaN to
    0; then one of its two neighbours among the integers in use, with probability by distance.
    """
    x = _units(entries, blocks.units) * _each(blocks.factor, blocks)
    x = _signed(x, blocks).view(-1)
    for log_stride, log_points in passes(blocks.log_block):
        x = butterflies(x, log_stride, log_points)
    v = x.view(-1, UNIT) * _each(blocks.scale, blocks) + quantizer.top / 2
    v = torch.where(v > 0, v, 0.0).clamp_(max=quantizer.top)
    for i in range(0, blocks.units, _BATCH):
        codes[i * UNIT : (i + _BATCH) * UNIT] = _rounded(
            v[i : i + _BATCH], blocks.first_unit + i, quantizer
        ).view(-1)


def dequantize(codes: Tensor, blocks: Blocks, finish: Finish, out: Tensor) -> None:
    """Write the result of sums of integers, codes[blocks.numel], to out[d], d at most that."""
    x = (2 * codes.to(torch.int32) - finish.offset).float()
    for log_stride, log_points in reversed(passes(blocks.log_block)):
        x = butterflies(x, log_stride, log_points)
    x = _signed(x.view(-1, UNIT) * _each(blocks.scale, blocks), blocks)
    x = divide(x, finish.divisor) * _each(blocks.factor, blocks)
    x = x.clamp_(-finish.limit, finish.limit)
    x = torch.where(x.isnan(), torch.nan, x)
    out.copy_(rounded(x.view(-1)[: out.numel()], out.dtype))


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write codes[m] to out: uint8[m · bits / 8], the first one lowest; m is a multiple of 256."""
    places = torch.arange(bits, dtype=torch.int32, device=codes.device)
    weights = 1 << torch.arange(8, dtype=torch.int32, device=codes.device)
    parts = zip(codes.split(_BATCH * UNIT), out.split(_BATCH * UNIT * bits // 8), strict=True)
    for batch, target in parts:
        ones = (batch.to(torch.int32)[:, None] >> places).bitwise_and_(1)
        target.copy_((ones.view(-1, 8) * weights).sum(1))


def unpack(payload: Tensor, bits: int) -> Tensor:
    """Return int32[m] from uint8[m · bits / 8]."""
    weights = 1 << torch.arange(bits, dtype=torch.int32, device=payload.device)
    places = torch.arange(8, dtype=torch.int32, device=payload.device)
    found = []
    for batch in payload.split(_BATCH * UNIT * bits // 8):
        ones = (batch.to(torch.int32)[:, None] >> places).bitwise_and_(1)
        found.append((ones.view(-1, bits) * weights).sum(1, dtype=torch.int32))
    return torch.cat(found)


def butterflies(x: Tensor, log_stride: int, log_points: int) -> Tensor:
    """Return sums and differences of float32[m] at the distances 1, 2, 4, ... times the stride."""
    for log_distance in range(log_stride, log_stride + log_points):
        pairs = x.view(-1, 2, 1 << log_distance)
        a, b = pairs[:, 0], pairs[:, 1]
        x = torch.stack([a + b, a - b], dim=1).view(-1)
    return x


def _units(entries: Tensor, units: int) -> Tensor:
    """Return float32[units, 256], zeros beyond the last entry."""
    padded = torch.zeros(units * UNIT, dtype=torch.float32, device=entries.device)
    padded[: entries.numel()] = entries
    return padded.view(-1, UNIT)


def _each(of_blocks: Tensor, blocks: Blocks) -> Tensor:
    """Return float32[units, 1] from one number per block."""
    return of_blocks.repeat_interleave(1 << blocks.log_block - LOG_UNIT)[:, None]


def _signed(x: Tensor, blocks: Blocks) -> Tensor:
    """Change the sign of entry 16 g + l of a unit where bit l of the unit's word g is set."""
    units = torch.arange(blocks.units, device=x.device) + blocks.first_unit
    words = randomness.words(blocks.signs, units, UNIT // _GROUP)[:, :, None]
    bits = words >> torch.arange(_GROUP, dtype=torch.int32, device=x.device)
    return torch.where(bits.bitwise_and(1).view(-1, UNIT) == 1, -x, x)


def _rounded(v: Tensor, first_unit: int, quantizer: Quantizer) -> Tensor:
    """Return int32[k, 256] from values float32[k, 256] in [0, g]."""
    units = torch.arange(len(v), device=v.device) + first_unit
    u = randomness.uniform(randomness.words(quantizer.key, units))
    below = v.to(torch.int32)
    low, gap = below.float(), torch.ones_like(v)
    if quantizer.table is not None:
        lows, gaps = neighbours(quantizer.table).to(v.device)
        low, gap = lows[below], gaps[below]
    return torch.where(v - low > u * gap, low + gap, low).to(torch.int32)


def neighbours(table: tuple[int, ...]) -> Tensor:
    """Return float32[2, g + 1]: the table's value at or below 0 to g, and the step to the next."""
    values = torch.tensor(table)
    at = torch.searchsorted(values, torch.arange(table[-1] + 1), right=True) - 1
    steps = torch.nn.functional.pad(values.diff(), (0, 1))
    return torch.stack([values[at], steps[at]]).float()
