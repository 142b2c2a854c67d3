"""The DynamiQ wire layout: the only place that knows where a byte of a payload is.

A chunk is a sequence of *tiles*. A tile holds up to 512 supergroups in descending order of
energy, and has a fixed number of bytes that depends on the layout and the budget only. So a
tile's address needs no data, segments are ranges of tiles, and kernels can treat tiles
independently. Inside a tile::

    codes of the widest supergroups | ... | codes of the narrowest | group scales | scales | zeros

Each width is one contiguous run. A supergroup of w bits takes 32 w bytes of codes, packed least
significant bit first; one UINT8 per group of 16 entries, unless the quantiser has no group
scales; one BF16 scale. A supergroup of 16 bits is 256 BF16 values without scales; one of 0 bits
takes nothing.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

GROUP = 16
"""Entries that share a UINT8 group scale."""
SUPERGROUP = 256
"""Entries that share a bit width, a BF16 scale, a mean and an energy."""
GROUPS = SUPERGROUP // GROUP
TILE = 512
"""Supergroups in a tile, at most."""
ALIGNMENT = 16
"""Tiles have a multiple of so many bytes where the budget allows it: what kernels move at once."""
STATISTIC_BYTES = 2
"""The BF16 energy of a supergroup; its BF16 mean, where means are sent."""
SCALE_BYTES = 2

Rounding = Literal["stochastic", "correlated", "nearest", "dithered"]
GroupScales = Literal["stochastic", "up"]


def code_bytes(width: int) -> int:
    """Return the bytes of a supergroup's codes."""
    return SUPERGROUP * width // 8


def supergroup_bytes(width: int, group_scales: GroupScales | None) -> int:
    """Return the bytes of a supergroup's codes and scales."""
    scales = group_scale_bytes(group_scales) + SCALE_BYTES if 0 < width < 16 else 0
    return code_bytes(width) + scales


def group_scale_bytes(group_scales: GroupScales | None) -> int:
    """Return the bytes of a supergroup's group scales."""
    return 0 if group_scales is None else GROUPS


@dataclass(frozen=True)
class Quantizer:
    """How a value becomes a code.

    Attributes:
        widths: Bit widths in use, ascending, from 1 to 10, and 16.
        levels: For each width below 16 the magnitudes of the indices 0 to R as float32 values,
            from 0 to 1; R = 2^(width - 1) - 1, and (0, 1) for one bit. Dithered codes have none.
        rounding: Of entries.
        group_scales: How UINT8 group scales are rounded; None: one scale for a supergroup.
    """

    widths: tuple[int, ...]
    levels: tuple[tuple[float, ...], ...]
    rounding: Rounding
    group_scales: GroupScales | None


@dataclass(frozen=True)
class Address:
    """What a message's random numbers are a function of, besides the entry."""

    seed: int
    call: int
    hop: int
    sender: int
    world_size: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of one segment of one message.

    Attributes:
        units: int64[t, s], each supergroup's index in the padded bucket, in descending order of
            energy; -1 where a tile has fewer than s supergroups.
        cuts: int64[t, widths], how many supergroups of a tile have at least each width.
        offsets: int64[t + 1], where tiles begin and end, even numbers; the payload begins at
            offsets[0].
        nbytes: Bytes of the payload.
        address: Of the message, for its random numbers.
    """

    units: Tensor
    cuts: Tensor
    offsets: Tensor
    nbytes: int
    address: Address


@dataclass(frozen=True)
class Run:
    """Consecutive supergroups of one tile with one width.

    Attributes:
        width: Bits.
        tile: Index of the tile.
        start: First supergroup in the tile.
        stop: One past the last.
        codes: Byte offset of the codes in the payload.
        group_scales: Byte offset of the group scales.
        scales: Byte offset of the BF16 scales.
    """

    width: int
    tile: int
    start: int
    stop: int
    codes: int
    group_scales: int
    scales: int


def part(run: Run, start: int, stop: int, group_scales: GroupScales | None) -> Run:
    """Return the supergroups start to stop of a run."""
    skip = start - run.start
    return Run(
        run.width,
        run.tile,
        start,
        stop,
        run.codes + skip * code_bytes(run.width),
        run.group_scales + skip * group_scale_bytes(group_scales),
        run.scales + skip * SCALE_BYTES,
    )


def runs(tiles: Tiles, quantizer: Quantizer) -> dict[int, list[Run]]:
    """Return, per width, where its supergroups are in every tile that has any."""
    widths = quantizer.widths
    each = group_scale_bytes(quantizer.group_scales)
    by_width: dict[int, list[Run]] = {width: [] for width in widths}
    offsets = (tiles.offsets - tiles.offsets[0]).tolist()
    for tile, cuts in enumerate(tiles.cuts.tolist()):
        bounds = [*cuts, 0]
        spans = [(w, bounds[i + 1], bounds[i]) for i, w in enumerate(widths)][::-1]
        first = next((stop for w, _, stop in spans if w == 16), 0)
        group_scales = offsets[tile] + sum((b - a) * code_bytes(w) for w, a, b in spans)
        scales = group_scales + (bounds[0] - first) * each
        codes = offsets[tile]
        for width, start, stop in spans:
            if stop > start:
                skip = start - first
                places = (codes, group_scales + skip * each, scales + skip * SCALE_BYTES)
                by_width[width].append(Run(width, tile, start, stop, *places))
            codes += (stop - start) * code_bytes(width)
    return by_width
