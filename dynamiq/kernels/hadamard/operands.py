"""What the operations read and write: rotated blocks, integers, and where results go.

The padded bucket is cut into blocks of 2^k entries that are rotated together, and into units of 256
that kernels, payloads and randomness count in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.core.randomness import BLOCK

UNIT = BLOCK
"""Entries of a unit: those that share one key of randomness."""
LOG_UNIT = 8
LOG_NEAR = 16
"""Entries that are no further apart are reached by the first two passes over memory."""
LOG_FAR_POINTS = 4
"""Of a pass that reaches further: more would all fall into one set of a CPU's cache, which holds 16
lines or fewer."""
MOST = 1 << 30
"""Sums of integers stay below this, so that twice a sum fits into an int32."""


@dataclass(frozen=True)
class Blocks:
    """Blocks that are rotated, one after the other, and what belongs to each.

    Towards integers entries are multiplied by ``factor``, rotated, and multiplied by ``scale``; on
    the way back integers are rotated, and multiplied by ``scale``, then by ``factor``.

    Attributes:
        log_block: k; each block has 2^k entries, k at least 8.
        first_unit: Index of the first unit in the padded bucket, for randomness.
        signs: Key of the random signs.
        factor: float32[blocks], powers of two.
        scale: float32[blocks].
    """

    log_block: int
    first_unit: int
    signs: int
    factor: Tensor
    scale: Tensor

    @property
    def numel(self) -> int:
        """Entries, padding included."""
        return len(self.factor) << self.log_block

    @property
    def units(self) -> int:
        """Units of 256 entries."""
        return self.numel // UNIT


@dataclass(frozen=True)
class Quantizer:
    """How rotated entries become integers from 0 to ``top``: stochastically, without bias.

    Attributes:
        key: Of this rank's random numbers.
        top: g; what is clamped lies at 0 and at g.
        table: The integers in use, ascending from 0 to g; None for all.
    """

    key: int
    top: int
    table: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Finish:
    """How a sum of integers becomes a result: 2 · sum - ``offset``, rotated back, divided, limited.

    Attributes:
        offset: g times the ranks that are summed.
        divisor: 1 for a sum, the number of ranks for a mean.
        limit: Largest magnitude; infinity for none.
    """

    offset: int
    divisor: float
    limit: float


def passes(log_block: int) -> tuple[tuple[int, int], ...]:
    """Return the passes over memory that rotate a block, as log2 of the stride and of the points.

    The first one does 256 points that lie together, the second up to 256 of what these give; the
    others share what is left, as equally as they can. Sums are added in this order towards
    integers, and pass by pass in the opposite order on the way back.
    """
    found = [(0, LOG_UNIT)]
    done = min(log_block, LOG_NEAR)
    if done > LOG_UNIT:
        found.append((LOG_UNIT, done - LOG_UNIT))
    rest = log_block - done
    for left in range(-(-rest // LOG_FAR_POINTS), 0, -1):
        points = -(-rest // left)
        found.append((done, points))
        done, rest = done + points, rest - points
    return tuple(found)


def width_of(top: int) -> int:
    """Return the bits that hold 0 to ``top``."""
    return top.bit_length()


def integer_dtype(top: int) -> torch.dtype:
    """Return the narrowest type of torch that holds 0 to ``top``."""
    if top < 1 << 8:
        return torch.uint8
    return torch.int16 if top < 1 << 15 else torch.int32


def payload_bytes(units: int, bits: int) -> int:
    """Return the bytes of some units of integers with so many bits each."""
    return units * UNIT * bits // 8
