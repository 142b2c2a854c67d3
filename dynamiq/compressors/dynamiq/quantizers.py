"""The levels of DynamiQ's non-uniform quantiser (DynamiQ §3.3)."""

import math
import struct

LEVELLED_BELOW = 16
"""Widths from 16 are plain BF16."""


def exponential_levels(width: int, epsilon: float) -> tuple[float, ...]:
    """Return the magnitudes of indices 0 to R = 2^(width - 1) - 1, from 0 to 1.

    f(ε, r) = ((1 + 2ε²)^r - 1) / ((1 + 2ε²)^R - 1), computed in float64 and rounded to float32;
    ε = 0 is the uniform limit r / R. One bit has the levels 0 and 1.
    """
    top = max(1, 2 ** (width - 1) - 1)
    step = math.log1p(2.0 * epsilon * epsilon)
    if step == 0.0:
        levels = [r / top for r in range(top + 1)]
    else:
        levels = [math.expm1(r * step) / math.expm1(top * step) for r in range(top + 1)]
    return struct.unpack(f"{top + 1}f", struct.pack(f"{top + 1}f", *levels))
