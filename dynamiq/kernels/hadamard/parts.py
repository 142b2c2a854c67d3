"""In which order blocks are rotated, so that a CPU finds them in its cache; no bit depends on it.

A part is what goes through all passes before the next part begins: its scratch memory is used
again. A part too large for the cache goes, piece by piece, through the passes that do not reach
beyond a piece, and as a whole through the others. A GPU takes everything at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from dynamiq.kernels.hadamard.operands import LOG_UNIT, UNIT, Blocks, passes

LOG_PIECE = 18
"""2^18 float32 numbers, a megabyte, stay in a core's own cache; fewer would be more calls."""


@dataclass(frozen=True)
class Piece:
    """Entries that lie together.

    Attributes:
        begin: The first, counted from that of the first block of all.
        numel: How many.
        blocks: What belongs to their blocks.
    """

    begin: int
    numel: int
    blocks: Blocks

    @property
    def units(self) -> int:
        """Units of 256 entries."""
        return self.numel // UNIT


@dataclass(frozen=True)
class Part(Piece):
    """Whole blocks.

    Attributes:
        pieces: All of their entries.
        near: How many passes reach no further than a piece.
    """

    pieces: tuple[Piece, ...]
    near: int


def parts_of(blocks: Blocks, device: torch.device) -> Iterator[Part]:
    """Yield whole blocks in parts; on a CPU, of as many entries as a piece or one block."""
    size, count = 1 << blocks.log_block, len(blocks.factor)
    steps = passes(blocks.log_block)
    together = max(1, (1 << LOG_PIECE) // size) if device.type == "cpu" else max(1, count)
    for first in range(0, count, together):
        chosen = _some(blocks, first, first + together)
        whole = Piece(first * size, chosen.numel, chosen)
        if device.type != "cpu" or blocks.log_block <= LOG_PIECE:
            yield Part(whole.begin, whole.numel, chosen, (whole,), len(steps))
            continue
        near = sum(stride + points <= LOG_PIECE for stride, points in steps)
        offsets = range(0, size, 1 << LOG_PIECE)
        pieces = tuple(
            Piece(whole.begin + at, 1 << LOG_PIECE, _later(chosen, at)) for at in offsets
        )
        yield Part(whole.begin, whole.numel, chosen, pieces, near)


def _some(blocks: Blocks, first: int, last: int) -> Blocks:
    here = slice(first, last)
    begin = blocks.first_unit + (first << (blocks.log_block - LOG_UNIT))
    return replace(blocks, first_unit=begin, factor=blocks.factor[here], scale=blocks.scale[here])


def _later(block: Blocks, entries: int) -> Blocks:
    return replace(block, first_unit=block.first_unit + entries // UNIT)
