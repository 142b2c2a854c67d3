"""What is known of a bucket before its data: made once per layout, and kept on the device.

A training step meets the same buckets again and again; no call waits for these to be copied.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.allocation import capacities
from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.core.layout import Layout


@dataclass(frozen=True)
class Supergroups:
    """The supergroups of a layout.

    Attributes:
        slices: int64[n + 1], see :meth:`dynamiq.core.layout.Layout.slice_offsets`.
        counts: int64[n * p], true entries of each supergroup.
        real: int64[u], the supergroups that have any.
    """

    slices: Tensor
    counts: Tensor
    real: Tensor

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, layout: Layout, device: torch.device) -> "Supergroups":
        """Return the supergroups of a layout."""
        counts = layout.true_entries()
        tables = (layout.slice_offsets(), counts, counts.nonzero()[:, 0])
        return cls(*(table.to(device) for table in tables))


@dataclass(frozen=True)
class Capacities:
    """The bytes of every tile, all chunks one after the other.

    Attributes:
        nbytes: Bytes of each tile.
        offsets: int64[n * tiles + 1], where they begin and end.
    """

    nbytes: tuple[int, ...]
    offsets: Tensor

    @classmethod
    @lru_cache(maxsize=64)
    def of(
        cls, deal: Deal, widths: tuple[int, ...], supergroup_budget: float, device: torch.device
    ) -> "Capacities":
        """Return the capacities for a budget in bytes per supergroup."""
        nbytes = tuple(capacities(deal.counts(), widths, supergroup_budget))
        return cls(nbytes, torch.tensor([*accumulate(nbytes, initial=0)]).to(device))
