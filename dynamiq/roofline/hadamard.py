"""What THC's kernels move: entries, float32 between passes, integers, and payloads of integers.

How wide integers are depends on ranks and bits. Rows are of one example, four ranks with 4 bits:
a rank's own integers, up to 15, take 4 bits on the wire, sums of two ranks 5, of three or four 6,
and sums are kept in bytes. Blocks are larger than 256 entries, so that the first pass and the last
one end, or begin, in float32; there are so few of them that their factors are not counted.
"""

from collections.abc import Iterator, Sequence

from dynamiq.kernels.hadamard.operands import UNIT, integer_dtype, payload_bytes, width_of
from dynamiq.kernels.registry import find_kernel
from dynamiq.roofline.case import Case
from dynamiq.roofline.traffic import ENTRY_BYTES, Traffic

RANKS, TOP = 4, 15
"""Of the example: ranks, and the largest integer of one."""
BITS = tuple(width_of(TOP * ranks) for ranks in range(1, RANKS + 1))
"""Bits of an integer in messages that sum 1, 2, ... ranks."""
INTEGERS = integer_dtype(TOP * RANKS)
"""What sums are kept in."""

_ENERGY = 8
_FLOATS, _SUMS = UNIT * 4, UNIT * INTEGERS.itemsize
_OWN, _TWO, _THREE, _ALL = (payload_bytes(1, bits) for bits in BITS)

PACK, ADD = f"pack {BITS[0]} bits", f"add {BITS[0]} bits"
REPACK, UNPACK = f"{BITS[1]} to {BITS[2]} bits", f"read {BITS[3]} bits"
FLOATS, ROUND, CENTRE = "float32", "to uint8", "from uint8"
_WITHOUT_ENTRIES = {
    "mix": {
        FLOATS: Traffic(_FLOATS, _FLOATS),
        ROUND: Traffic(_FLOATS, _SUMS),
        CENTRE: Traffic(_SUMS, _FLOATS),
    },
    "carry": {
        PACK: Traffic(_SUMS, _OWN),
        ADD: Traffic(_OWN + _SUMS, _SUMS),
        REPACK: Traffic(_TWO + _SUMS, _THREE),
        UNPACK: Traffic(_ALL, _SUMS),
    },
}


def cases(formats: Sequence[str], widths: Sequence[int]) -> Iterator[Case]:
    """Yield every kernel by entry format and by what it does; widths are those of the example."""
    for kernel in ("energies", "rotate", "mix", "carry", "rotate_back"):
        for entry_format in find_kernel(kernel).formats_among(formats):
            for operands in _WITHOUT_ENTRIES.get(kernel, (None,)):
                yield Case(kernel, entry_format, operands=operands)


def traffic(case: Case, units: int) -> Traffic:
    """Return what one call moves, with all units full."""
    unit = _of_unit(case)
    return Traffic(units * unit.read_bytes, units * unit.written_bytes)


def _of_unit(case: Case) -> Traffic:
    if case.kernel in _WITHOUT_ENTRIES:
        return _WITHOUT_ENTRIES[case.kernel][case.operands or ""]
    entries = UNIT * ENTRY_BYTES[case.format or ""]
    return {
        "energies": Traffic(entries, _ENERGY),
        "rotate": Traffic(entries, _FLOATS),
        "rotate_back": Traffic(_FLOATS, entries),
    }[case.kernel]
