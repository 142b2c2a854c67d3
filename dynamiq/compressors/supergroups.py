"""The blocks of 256 entries that several formats treat as one: which of a layout's hold entries.

Made once per layout, and kept on the device.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dynamiq.core.layout import Layout


@dataclass(frozen=True)
class Supergroups:
    """The supergroups of a layout.

    Attributes:
        slices: int64[n + 1], see :meth:`dynamiq.core.layout.Layout.slice_offsets`.
        counts: int64[n * p], true entries of each supergroup.
        real: Which supergroups have any: int64[units], or a slice if those are the first ones.
        units: How many these are.
    """

    slices: Tensor
    counts: Tensor
    real: Tensor | slice
    units: int

    @classmethod
    @lru_cache(maxsize=64)
    def of(cls, layout: Layout, device: torch.device) -> "Supergroups":
        """Return the supergroups of a layout."""
        counts = layout.true_entries()
        found = counts.nonzero()[:, 0]
        real = slice(len(found)) if layout.bounds is None else found.to(device)
        return cls(layout.slice_offsets().to(device), counts.to(device), real, len(found))
