"""Where each supergroup goes: sorted by energy and dealt to chunks and tiles like cards.

Every chunk, and every tile of a chunk, then has nearly the same number of supergroups at every
width: no rank is a straggler, and each width is one contiguous run. Nobody sends the order; every
rank derives it from the same statistics.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import Tensor

from dynamiq.core.layout import Layout
from dynamiq.kernels.wire import TILE


@dataclass(frozen=True)
class Deal:
    """The shape of the tiles: known from the layout alone.

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

    def counts(self) -> list[int]:
        """Return the supergroups of all tiles, chunk by chunk."""
        n, layout = self.layout.world_size, self.layout
        if layout.bounds is None:
            chunks = [-(-(layout.units - c) // n) for c in range(n)]
        else:
            chunks = [-(-layout.slice_numel(c) // layout.unit) for c in range(n)]
        return [-(-(count - t) // self.tiles) for count in chunks for t in range(self.tiles)]

    def units(self, energies: Tensor) -> Tensor:
        """Return int64[n, tiles, size]: the supergroup at every place, -1 where there is none.

        Args:
            energies: float64[n * p], -1 for padding supergroups; stable, ties by index.
        """
        n, p = self.layout.world_size, self.layout.positions
        if self.layout.bounds is None:
            order = energies.argsort(descending=True, stable=True)
            hands = order.view(p, n).T
        else:
            hands = energies.view(n, p).argsort(dim=1, descending=True, stable=True)
            hands = hands + torch.arange(n, device=hands.device)[:, None] * p
        hands = torch.where(energies[hands] >= 0, hands, -1)
        padded = F.pad(hands, (0, self.tiles * self.size - p), value=-1)
        return padded.view(n, self.size, self.tiles).transpose(1, 2).contiguous()
