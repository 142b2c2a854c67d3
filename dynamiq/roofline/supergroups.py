"""What the kernels of DynamiQ move: entries, payloads, sums, and the tables of tiles."""

from collections.abc import Iterator, Sequence

from dynamiq.kernels.registry import kernels_of
from dynamiq.kernels.supergroups.wire import SUPERGROUP, TILE, supergroup_bytes
from dynamiq.roofline.case import Case
from dynamiq.roofline.traffic import ENTRY_BYTES, Traffic

_SUMS = SUPERGROUP * 4
_RANGE = 2 * 4  # factor and shift, or factor and offset; or an energy and a mean
_INDEX = 8


def cases(formats: Sequence[str], widths: Sequence[int]) -> Iterator[Case]:
    """Yield every kernel by entry format, and by width if it has widths."""
    for spec in kernels_of("supergroups"):
        for entry_format in spec.formats_among(formats):
            for width in widths if spec.has_widths else (None,):
                yield Case(spec.name, entry_format, width)


def traffic(case: Case, units: int) -> Traffic:
    """Return what one call moves, with all supergroups full, in full tiles, and of one width.

    Values are a rank's own entries, as at the first hop that touches a chunk; only ``store`` reads
    sums.
    """
    s, tiles = units, -(-units // TILE)
    entries = s * SUPERGROUP * ENTRY_BYTES[case.format or ""]
    order, scaling, sums = s * _INDEX, s * _RANGE, s * _SUMS
    payload = s * supergroup_bytes(case.width or 0, "up")
    cuts, offsets = tiles * _INDEX, (tiles + 1) * _INDEX
    places = order + cuts + offsets
    own = entries + scaling
    counted = {
        "statistics": (entries, s * _RANGE),
        "compress": (own + places, payload),
        "decompress": (payload + places + scaling, entries),
        "decompress_accumulate": (payload + own + places, sums),
        "decompress_accumulate_recompress": (payload + own + places, payload),
        "store": (sums + order + scaling, entries),
    }
    return Traffic(*counted[case.kernel])
