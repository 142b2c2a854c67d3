"""The DynamiQ wire layout: the only place that knows where a byte of a payload is.

A chunk is a sequence of *tiles*. A tile holds up to 512 supergroups in descending order of
energy, and has a fixed number of bytes that depends on the layout and the budget only. So a
tile's address needs no data, segments are ranges of tiles, and kernels can treat tiles
independently. Inside a tile::

    codes of the widest supergroups | ... | codes of the narrowest | group scales | scales | zeros

Each width is one contiguous run. A supergroup of w bits takes 32 w bytes of codes, packed least
significant bit first; one UINT8 per group of 16 entries; one BF16 scale. A supergroup of 16 bits
is 256 BF16 values without scales; one of 0 bits takes nothing.
"""

from collections.abc import Sequence
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
STATISTICS_BYTES = 4
"""The BF16 energy and the BF16 mean of a supergroup."""
SCALE_BYTES = 2

Rounding = Literal["stochastic", "correlated", "nearest"]
ScaleRounding = Literal["stochastic", "up"]


def code_bytes(width: int) -> int:
    """Return the bytes of a supergroup's codes."""
    return SUPERGROUP * width // 8


def supergroup_bytes(width: int) -> int:
    """Return the bytes of a supergroup's codes and scales."""
    scales = GROUPS + SCALE_BYTES if 0 < width < 16 else 0
    return code_bytes(width) + scales


@dataclass(frozen=True)
class Quantizer:
    """How a value becomes a code.

    Attributes:
        widths: Bit widths in use, ascending, from 1 to 10, and 16.
        levels: For each width below 16 the magnitudes of the indices 0 to R as float32 values,
            from 0 to 1; R = 2^(width - 1) - 1, and (0, 1) for one bit.
        rounding: Of entries.
        scale_rounding: Of group scales.
    """

    widths: tuple[int, ...]
    levels: tuple[tuple[float, ...], ...]
    rounding: Rounding
    scale_rounding: ScaleRounding


@dataclass(frozen=True)
class Tiles:
    """The tiles of one segment of one chunk.

    Attributes:
        units: int64[t, s], each supergroup's index in the padded bucket, in descending order of
            energy; -1 where a tile has fewer than s supergroups.
        cuts: int64[t, widths], how many supergroups of a tile have at least each width.
        offsets: int64[t + 1], where tiles begin and end, even numbers; the payload begins at
            offsets[0].
        nbytes: Bytes of the payload.
    """

    units: Tensor
    cuts: Tensor
    offsets: Tensor
    nbytes: int


@dataclass(frozen=True)
class Address:
    """What a message's random numbers are a function of, besides the entry."""

    seed: int
    call: int
    hop: int
    sender: int
    world_size: int


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

    def part(self, start: int, stop: int) -> "Run":
        """Return the supergroups start to stop of this run."""
        skip = start - self.start
        return Run(
            self.width,
            self.tile,
            start,
            stop,
            self.codes + skip * code_bytes(self.width),
            self.group_scales + skip * GROUPS,
            self.scales + skip * SCALE_BYTES,
        )


def runs(tiles: Tiles, widths: Sequence[int]) -> dict[int, list[Run]]:
    """Return, per width, where its supergroups are in every tile that has any."""
    by_width: dict[int, list[Run]] = {width: [] for width in widths}
    offsets = (tiles.offsets - tiles.offsets[0]).tolist()
    for tile, cuts in enumerate(tiles.cuts.tolist()):
        bounds = [*cuts, 0]
        spans = [(w, bounds[i + 1], bounds[i]) for i, w in enumerate(widths)][::-1]
        first = next((stop for w, _, stop in spans if w == 16), 0)
        group_scales = offsets[tile] + sum((b - a) * code_bytes(w) for w, a, b in spans)
        scales = group_scales + (bounds[0] - first) * GROUPS
        codes = offsets[tile]
        for width, start, stop in spans:
            if stop > start:
                skip = start - first
                places = (codes, group_scales + skip * GROUPS, scales + skip * SCALE_BYTES)
                by_width[width].append(Run(width, tile, start, stop, *places))
            codes += (stop - start) * code_bytes(width)
    return by_width
