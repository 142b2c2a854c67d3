"""Where each supergroup goes: sorted by energy and dealt to chunks and tiles like cards.

Every tile then has nearly the same supergroups: no rank is a straggler, each width is one
contiguous run, and one list of cuts serves all tiles. Nobody sends the order; every rank derives
it from the same statistics.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from dynamiq.core.arithmetic import descending_order
from dynamiq.core.layout import Layout
from dynamiq.kernels.supergroups.wire import TILE

_SMALL = 32
"""Supergroups of a tile up to which chunks get cuts of their own."""


@dataclass(frozen=True)
class Deal:
    """The shape of the tiles: known from the layout alone.

    Without bounds all supergroups are sorted and dealt together; with bounds, those of each chunk.

    Attributes:
        layout: Of supergroups; given bounds are never crossed.
        tiles: Tiles per chunk.
        size: Supergroups per tile, the largest's.
    """

    layout: Layout
    tiles: int
    size: int

    @classmethod
    def of(cls, layout: Layout) -> "Deal":
        """Use as few tiles as hold a chunk, all of nearly the same size."""
        tiles = -(-layout.positions // TILE)
        return cls(layout, tiles, -(-layout.positions // tiles) if tiles else 0)

    @property
    def deals(self) -> int:
        """How many lists of cuts there are: one for all tiles, or one for each chunk's.

        In small tiles a row that some lack, or that holds unlike supergroups, would count.
        """
        alike = self.layout.bounds is None and self.size > _SMALL
        return 1 if alike else self.layout.world_size

    def counts(self) -> list[int]:
        """Return the supergroups of all tiles, chunk by chunk."""
        n, layout = self.layout.world_size, self.layout
        if layout.bounds is None:
            least, more = divmod(layout.units, n)
            chunks = [least + 1] * more + [least] * (n - more)
        else:
            chunks = [-(-layout.slice_numel(c) // layout.unit) for c in range(n)]
        if self.tiles == 1:
            return chunks
        return [-(-(count - t) // self.tiles) for count in chunks for t in range(self.tiles)]

    def units(self, energies: Tensor) -> Tensor:
        """Return int64[n, tiles, size]: the supergroup at every place, -1 where there is none.

        Energies are compared as bfloat16, cut off: eight bits are enough to sort by.

        Args:
            energies: float64[n * p], -1 for padding supergroups; stable, ties by index.
        """
        n, p = self.layout.world_size, self.layout.positions
        # Padding, -1, has key 0; what is not padding at least 1.
        keys = (energies.float().view(torch.int32) >> 16).clamp_(min=-1).add_(1).to(torch.int16)
        if self.layout.bounds is None:
            order = descending_order(keys)
            order[self.layout.units :] = -1
            hands = order.view(p, n).T
        else:
            hands = torch.stack(
                [descending_order(k) + c * p for c, k in enumerate(keys.view(n, p))]
            )
            for chunk, row in enumerate(hands):
                row[-(-self.layout.slice_numel(chunk) // self.layout.unit) :] = -1
        padded = F.pad(hands, (0, self.tiles * self.size - p), value=-1)
        return padded.view(n, self.size, self.tiles).transpose(1, 2).contiguous()
