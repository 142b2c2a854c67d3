"""The union of blocks: where its entries are in the tensor, and how they are packed."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from dynamiq.core.layout import Layout
from dynamiq.kernels.supergroups.wire import SUPERGROUP

BLOCK = SUPERGROUP
"""Entries of a block."""


@dataclass(frozen=True)
class Union:
    """The blocks that are sent, one after the other without gaps.

    Attributes:
        parts: The whole tensor, or each slice when bounds are given.
        count: Blocks.
    """

    parts: tuple["Part", ...]
    count: int

    @classmethod
    def of(cls, sent: Tensor, layout: Layout, device: torch.device) -> Self:
        """Return the union.

        Args:
            sent: bool[u] on the CPU, blocks of the layout that hold entries, in order.
            layout: In units of a block.
            device: Of the indices.
        """
        slices = [(0, layout.numel)]
        if layout.bounds is not None:
            slices = list(pairwise(layout.bounds))
        counts = [-(-(stop - start) // BLOCK) for start, stop in slices]
        whole, rests = [], []
        for flags, (start, stop) in zip(sent.split(counts), slices, strict=True):
            blocks, rest = divmod(stop - start, BLOCK)
            whole.append(flags[:blocks].nonzero()[:, 0])
            rests.append(rest if rest and flags[-1] else 0)
        # One copy for all parts.
        indices = torch.cat(whole).to(device).split([len(part) for part in whole])
        parts = (Part(*ends, *of) for ends, *of in zip(slices, indices, rests, strict=True))
        return cls(tuple(parts), int(sent.count_nonzero()))

    def places(self, values: Tensor, x: Tensor) -> Iterator[tuple["Part", Tensor, Tensor]]:
        """Yield each part, its share of values[numel] and its entries of x[d]."""
        sizes = [part.numel for part in self.parts]
        for part, here in zip(self.parts, values.split(sizes), strict=True):
            yield part, here, x[part.start : part.stop]

    def bounds(self, layout: Layout) -> tuple[int, ...]:
        """Return where chunks of the union's entries begin and end.

        Chunks are the slices when bounds are given, and else have the same number of blocks, or one
        more or less.
        """
        ends = [*accumulate((part.numel for part in self.parts), initial=0)]
        if layout.bounds is not None:
            return tuple(ends)
        n = layout.world_size
        return tuple(min(BLOCK * (self.count * c // n), ends[-1]) for c in range(n + 1))


@dataclass(frozen=True)
class Part:
    """Blocks of a contiguous part of the flat tensor: all of it, or a slice given by bounds.

    Attributes:
        start: Where the part begins.
        stop: Where it ends.
        whole: int64[k], which of its whole blocks are sent, ascending.
        rest: Entries of the block that the end cuts off, if it is sent, or else 0.
    """

    start: int
    stop: int
    whole: Tensor
    rest: int

    @property
    def numel(self) -> int:
        """Entries that are sent."""
        return BLOCK * len(self.whole) + self.rest

    def gather(self, entries: Tensor, out: Tensor) -> None:
        """Copy what is sent of the part's entries to out[numel]."""
        whole, rest = self._split(out)
        torch.index_select(self._blocks(entries), 0, self.whole, out=whole)
        rest.copy_(entries[entries.numel() - self.rest :])

    def scatter(self, values: Tensor, out: Tensor) -> None:
        """Write values[numel] to their places among the part's entries, and zeros elsewhere."""
        whole, rest = self._split(values)
        out.zero_()
        self._blocks(out).index_copy_(0, self.whole, whole)
        out[out.numel() - self.rest :] = rest

    def _split(self, values: Tensor) -> tuple[Tensor, Tensor]:
        whole, rest = values.split([self.numel - self.rest, self.rest])
        return whole.view(-1, BLOCK), rest

    @staticmethod
    def _blocks(entries: Tensor) -> Tensor:
        return entries[: entries.numel() // BLOCK * BLOCK].view(-1, BLOCK)
