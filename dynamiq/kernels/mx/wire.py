"""The MX wire layout and the element formats: one table, and where a byte of a payload is.

OCP Microscaling Formats (MX) Specification v1.0: 32 entries share a scale 2^(e - 127), e one byte
(E8M0; 255 is NaN, there is no zero), and each entry is an element of 8, 6 or 4 bits. A payload is::

    codes of all blocks | scales of all blocks

Codes are packed least significant bit first: a block of w-bit elements takes 4 w bytes. The last
block of a chunk is sent whole, with zeros behind the last entry.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

BLOCK = 32
"""Entries that share a scale."""
SUPERGROUP = 256
"""Entries that a team of threads works on: 8 blocks."""
BLOCKS = SUPERGROUP // BLOCK
NAN_SCALE = 255
"""The scale of a block that holds a NaN or an infinity."""
PRESCALE = 0.75
"""Of the prescaled rounding: the floor rule leaves less than twice 2^emax, and 3/4 of that is
no more than the largest number of every element format (Tseng et al. 2025, "Training LLMs with
MXFP4")."""

Name = Literal["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1"]
ScaleRule = Literal["floor", "ceil"]
Rounding = Literal["nearest", "stochastic", "prescaled"]


@dataclass(frozen=True)
class Element:
    """An element format: a sign, an exponent, a mantissa.

    Attributes:
        index: Which one, in the order of :data:`ELEMENTS`.
        exponent_bits: Bits of the exponent.
        mantissa_bits: Bits of the mantissa.
        top: The code of the largest finite magnitude.
        emax: Its binary exponent.
        has_infinity: Whether the code after it is an infinity; all others beyond are NaN.
    """

    index: int
    exponent_bits: int
    mantissa_bits: int
    top: int
    emax: int
    has_infinity: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def emin(self) -> int:
        """Binary exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def largest(self) -> float:
        """The largest finite number."""
        mantissa = self.top % 2**self.mantissa_bits / 2**self.mantissa_bits
        return float((1 + mantissa) * 2.0**self.emax)

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's codes."""
        return BLOCK * self.bits // 8


ELEMENTS: dict[Name, Element] = {
    "mxfp8_e4m3": Element(0, 4, 3, 0x7E, 8),
    "mxfp8_e5m2": Element(1, 5, 2, 0x7B, 15, has_infinity=True),
    "mxfp6_e3m2": Element(2, 3, 2, 0x1F, 4),
    "mxfp6_e2m3": Element(3, 2, 3, 0x1F, 2),
    "mxfp4_e2m1": Element(4, 2, 1, 0x07, 2),
}


@dataclass(frozen=True)
class Quantizer:
    """How a block becomes bytes.

    Attributes:
        element: Of the codes.
        scale_rule: "floor": 2^(⌊log2 max⌋ - emax), as the specification says; the upper end of a
            block may saturate. "ceil": the smallest power of two at which nothing does.
        rounding: "nearest": ties to even. "stochastic": to a neighbour with probability by
            distance. "prescaled": the same of 3/4 of the value, undone by the decoder.
    """

    element: Element
    scale_rule: ScaleRule = "floor"
    rounding: Rounding = "nearest"


@dataclass(frozen=True)
class Segment:
    """Where the entries of a payload are from, and what its random numbers belong to.

    Attributes:
        blocks: Blocks with at least one entry; all but the last supergroup have 8 of them.
        first: Index of the first supergroup in the padded bucket.
        key: 64-bit key of the message's random numbers.
        scales: uint8[8 s], the scale of every block if it is given; None: each block's largest
            magnitude decides.
    """

    blocks: int
    first: int
    key: int
    scales: Tensor | None = None

    @property
    def supergroups(self) -> int:
        """Supergroups s with at least one entry."""
        return -(-self.blocks // BLOCKS)


def payload_bytes(element: Element, entries: int) -> int:
    """Return the bytes of the blocks of so many entries."""
    return -(-entries // BLOCK) * (element.block_bytes + 1)
