"""What the kernels of the MX formats move: float32 values and payloads of one element format.

Values are the float32 copy of a bucket, whatever its dtype is. Scales that a caller gives, one
byte for 32 entries, are not counted: each block's largest magnitude decides.
"""

from collections.abc import Iterator, Sequence

from dynamiq.kernels.mx.wire import ELEMENTS, SUPERGROUP, payload_bytes
from dynamiq.kernels.registry import kernels_of
from dynamiq.roofline.case import Case
from dynamiq.roofline.traffic import ENTRY_BYTES, Traffic


def cases(formats: Sequence[str], widths: Sequence[int]) -> Iterator[Case]:
    """Yield every kernel by element format; widths are those of elements."""
    for spec in kernels_of("mx"):
        for entry_format in spec.formats_among(formats):
            for element in ELEMENTS:
                yield Case(spec.name, entry_format, operands=element)


def traffic(case: Case, units: int) -> Traffic:
    """Return what one call moves, with all blocks full."""
    values = units * SUPERGROUP * ENTRY_BYTES[case.format or ""]
    element = {str(name): found for name, found in ELEMENTS.items()}[case.operands or ""]
    payload = payload_bytes(element, units * SUPERGROUP)
    counted = {
        "mx_compress": (values, payload),
        "mx_decompress": (payload, values),
        "mx_decompress_accumulate": (payload + values, values),
        "mx_decompress_accumulate_recompress": (payload + values, payload),
    }
    return Traffic(*counted[case.kernel])
