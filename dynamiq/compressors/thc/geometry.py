"""Which entries are rotated together, and which units a chunk has; index arithmetic only."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from dynamiq.core.layout import Layout
from dynamiq.kernels.hadamard.operands import LOG_UNIT

PADDING = 1 / 16
"""The most that padding may add, unless a part has fewer than 4096 entries."""


@dataclass(frozen=True)
class Part:
    """Entries that are rotated without any others: the bucket, or a slice given from outside.

    Attributes:
        start: Its first entry in the flat tensor.
        stop: The one after its last.
        log_block: Its blocks have 2^log_block entries each.
        blocks: How many there are.
        first_unit: Its first unit of 256 entries in the padded bucket.
        first_block: Its first block among those of all parts.
    """

    start: int
    stop: int
    log_block: int
    blocks: int
    first_unit: int
    first_block: int

    @property
    def units(self) -> int:
        """Units of 256 entries, padding included."""
        return self.blocks << (self.log_block - LOG_UNIT)


@dataclass(frozen=True)
class Geometry:
    """The padded bucket: all parts, one after the other.

    Attributes:
        parts: The bucket; with bounds, slice by slice, those without entries, too.
        first_units: n + 1 units of the padded bucket: chunk c has those from c to c + 1.
    """

    parts: tuple[Part, ...]
    first_units: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, layout: Layout) -> "Geometry":
        """Return the geometry of a layout."""
        n = layout.world_size
        if layout.bounds is None:
            parts = _parts([(0, layout.numel)])
            units = parts[0].units
            return cls(parts, tuple(units * c // n for c in range(n + 1)))
        parts = _parts([layout.slice_bounds(c) for c in range(n)])
        last = parts[-1].first_unit + parts[-1].units
        return cls(parts, (*(part.first_unit for part in parts), last))

    @property
    def units(self) -> int:
        """Units of the padded bucket."""
        return self.first_units[-1]

    @property
    def blocks(self) -> int:
        """Blocks of all parts."""
        return self.parts[-1].first_block + self.parts[-1].blocks

    @property
    def positions(self) -> int:
        """Units of the largest chunk."""
        ends = self.first_units
        return max(b - a for a, b in pairwise(ends))

    def units_of(self, chunk: int, positions: range) -> range:
        """Return the units of the padded bucket at some positions of a chunk."""
        first, last = self.first_units[chunk], self.first_units[chunk + 1]
        return range(min(first + positions.start, last), min(first + positions.stop, last))


def log_block_of(numel: int) -> int:
    """Return log2 of the largest blocks whose padding stays under a sixteenth of ``numel``.

    At least 256: fewer than 4096 entries are padded to whole units.
    """
    log_block = max(LOG_UNIT, (numel - 1).bit_length())
    while log_block > LOG_UNIT and -numel % (1 << log_block) > numel * PADDING:
        log_block -= 1
    return log_block


def _parts(bounds: list[tuple[int, int]]) -> tuple[Part, ...]:
    parts: list[Part] = []
    unit = block = 0
    for start, stop in bounds:
        log_block = log_block_of(stop - start)
        blocks = -((start - stop) >> log_block)
        parts.append(Part(start, stop, log_block, blocks, unit, block))
        unit, block = unit + parts[-1].units, block + blocks
    return tuple(parts)
