"""The bytes that an operation must read and write, counted from its operands.

Each operand counts once: entries in their dtype, payloads, sums, and the tables that go with
supergroups and tiles. What a call reads once whatever its size is left out: slices, the
quantiser's tables. So this is the least that any implementation moves between memory and cores.
"""

from dataclasses import dataclass

from dynamiq.kernels.supergroups.wire import SUPERGROUP, TILE, supergroup_bytes

ENTRY_BYTES = {"FP32": 4, "BF16": 2, "FP16": 2}
"""Bytes of an entry, by entry format."""
COPY = "copy"
"""The name of a plain copy of the entries, what everything else is held against."""

_SUMS = SUPERGROUP * 4
_RANGE = 2 * 4  # factor and shift, or factor and offset; or an energy and a mean
_INDEX = 8


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call."""

    read_bytes: int
    written_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Both together."""
        return self.read_bytes + self.written_bytes


def traffic(kernel: str, entry_format: str, width: int | None, supergroups: int) -> Traffic:
    """Return what one call moves, with all supergroups full, in full tiles, and of one width.

    Values are a rank's own entries, as at the first hop that touches a chunk; only ``store`` reads
    sums.

    Args:
        kernel: A kernel of the family ``supergroups``, or "copy".
        entry_format: A key of :data:`ENTRY_BYTES`.
        width: Bits of a code; of no account for kernels without widths.
        supergroups: How many.

    Raises:
        KeyError: There is no such kernel or entry format.
    """
    s, tiles = supergroups, -(-supergroups // TILE)
    entries = s * SUPERGROUP * ENTRY_BYTES[entry_format]
    units, scaling, sums = s * _INDEX, s * _RANGE, s * _SUMS
    payload = s * supergroup_bytes(width or 0, "up")
    cuts, offsets = tiles * _INDEX, (tiles + 1) * _INDEX
    places = units + cuts + offsets
    own = entries + scaling
    counted = {
        COPY: (entries, entries),
        "statistics": (entries, s * _RANGE),
        "compress": (own + places, payload),
        "decompress": (payload + places + scaling, entries),
        "decompress_accumulate": (payload + own + places, sums),
        "decompress_accumulate_recompress": (payload + own + places, payload),
        "store": (sums + units + scaling, entries),
    }
    return Traffic(*counted[kernel])
