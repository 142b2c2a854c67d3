"""The quantiser and the wire layout of DynamiQ once more: from the design's text, in float64.

Nothing of :mod:`dynamiq.kernels.supergroups.reference` is used, so that both would have to be
wrong in the same way. Slow and direct: one tile, one supergroup at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dynamiq.kernels.supergroups.wire import Address, Quantizer, Tiles

ADDRESS = Address(seed=1, call=2, hop=0, sender=1, world_size=4)
EPSILON = {4: 0.30, 8: 0.08}
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16)


def levels(width: int, epsilon: float = 0.0) -> np.ndarray:
    """Return the magnitudes f(ε, r) of the indices 0 to R = 2^(width - 1) - 1 (DynamiQ §3.3)."""
    top = max(1, 2 ** (width - 1) - 1)
    r = np.arange(top + 1, dtype=np.float64)
    base = 1 + 2 * epsilon**2
    return r / top if epsilon == 0 else (base**r - 1) / (base**top - 1)


def values_of_codes(width: int, epsilon: float = 0.0) -> np.ndarray:
    """Return what the codes 0, 1, ... stand for, relative to the scale."""
    if width == 1:
        return np.array([-1.0, 1.0])
    magnitudes = levels(width, epsilon)
    return np.concatenate([-magnitudes[:0:-1], magnitudes])


def quantizer(
    widths: Sequence[int], rounding: str = "stochastic", group_scales: str = "stochastic"
) -> Quantizer:
    """Return a quantiser whose levels come from here."""
    tables = (levels(w, EPSILON.get(w, 0.0)) if w < 16 else () for w in widths)
    as_float32 = tuple(tuple(np.float32(table).tolist()) for table in tables)
    return Quantizer(tuple(widths), as_float32, rounding, group_scales)


def supergroup_bytes(width: int, group_scales: str | None = "stochastic") -> int:
    """Codes, 16 group scales of one byte, one scale of two; 16 bits have no scales, 0 nothing."""
    scales = 2 if group_scales is None else 18
    return 0 if width == 0 else 256 * width // 8 + (scales if width < 16 else 0)


def tiles(
    assigned: Sequence[Sequence[int]],
    widths: Sequence[int],
    *,
    first_unit: int = 0,
    spare: int = 0,
    begin: int = 0,
    group_scales: str | None = "stochastic",
    address: Address = ADDRESS,
) -> Tiles:
    """Return tiles whose supergroups have the given widths, descending in each tile.

    Args:
        assigned: Width of every supergroup of every tile, 0 for none.
        widths: Widths of the quantiser.
        first_unit: Index of the first supergroup in the bucket; the others follow it.
        spare: Bytes that are left over at the end of each tile.
        begin: Where the first tile begins in its chunk.
        group_scales: Those of the quantiser.
        address: Of the message.
    """
    size = max(map(len, assigned))
    units = torch.full((len(assigned), size), -1)
    offsets, unit = [begin], first_unit
    for t, tile in enumerate(assigned):
        units[t, : len(tile)] = torch.arange(unit, unit + len(tile))
        unit += len(tile)
        used = sum(supergroup_bytes(width, group_scales) for width in tile)
        offsets.append(offsets[-1] + used + spare)
    cuts = [[sum(given >= w for given in tile) for w in widths] for tile in assigned]
    places = (torch.tensor(cuts), torch.tensor(offsets), offsets[-1] - begin)
    return Tiles(units, *places, address)


@dataclass(frozen=True)
class Coded:
    """What a payload says about one supergroup.

    Attributes:
        width: Bits.
        codes: int[256], or for 16 bits the values themselves.
        group_codes: int[16], or None where there are no scales.
        scale: The scale, or None.
    """

    width: int
    codes: np.ndarray
    group_codes: np.ndarray | None = None
    scale: float | None = None

    def decoded(self) -> np.ndarray:
        """Return float64[256]."""
        if self.width == 16:
            return self.codes
        relative = values_of_codes(self.width, EPSILON.get(self.width, 0.0))[self.codes]
        return relative * np.repeat(self.scale * self.group_codes / 255, 16)


def read_tile(payload: Tensor, assigned: Sequence[int]) -> tuple[list[Coded], bytes]:
    """Read a tile's bytes; return its supergroups of more than 0 bits, and what comes after.

    Codes from the widest supergroup to the narrowest, then all group scales, then all scales.
    """
    data, position = payload.numpy(), 0

    def take(count: int) -> np.ndarray:
        nonlocal position
        position += count
        return data[position - count : position]

    sent = [width for width in assigned if width]
    codes = []
    for width in sent:
        if width == 16:
            codes.append(_bfloat16(take(512)))
        else:
            bits = np.unpackbits(take(32 * width), bitorder="little").reshape(256, width)
            codes.append((bits * 2 ** np.arange(width)).sum(1))
    scaled = [width for width in sent if width < 16]
    group_codes = [take(16).astype(int) for _ in scaled]
    scales = [float(_bfloat16(take(2))[0]) for _ in scaled]
    plain = len(sent) - len(scaled)
    supergroups = [Coded(16, c) for c in codes[:plain]]
    supergroups += map(Coded, scaled, codes[plain:], group_codes, scales)
    return supergroups, data[position:].tobytes()


def _bfloat16(data: np.ndarray) -> np.ndarray:
    """Read BF16 values: the upper half of a little-endian float32."""
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def bfloat16_at_least(x: float) -> float:
    """Return the smallest bfloat16 that is not below x > 0 (normal numbers)."""
    mantissa, exponent = np.frexp(x)
    return float(np.ldexp(np.ceil(mantissa * 256) / 256, exponent))
