"""What is known of a bucket before its data: made once per layout, and kept on the device.

A training step meets the same buckets again and again; no call waits for these to be copied.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.kernels.supergroups.wire import ALIGNMENT

_AMPLE_BYTES = 4096
"""Where a tile has so many to give away, less than a multiple of ALIGNMENT is no loss."""


@dataclass(frozen=True)
class Capacities:
    """How many bytes tiles have.

    All tiles of a deal have as many as its full ones, but ``gap`` less where they have a
    supergroup less. Payload sizes must not depend on this call's data, so a message has as many
    bytes per full tile as was decided before: :attr:`mean` for each, or more for one hop and less
    for another.

    Attributes:
        rows: Supergroups of a full tile, by deal.
        mean: Bytes of a full tile that use up the budget if all hops have as many, by deal.
        gap: Bytes.
        grain: What bytes of full tiles should be multiples of.
        missing: How many supergroups the tiles before each tile have too few, all chunks one after
            the other: n * tiles + 1 numbers.
        places: int64[n * tiles + 1] 0, 1, 2, ... on the device.
        gaps: ``missing`` · ``gap`` as int64[n * tiles + 1] on the device.
    """

    rows: tuple[int, ...]
    mean: tuple[int, ...]
    gap: int
    grain: int
    missing: tuple[int, ...]
    places: Tensor = field(compare=False)
    gaps: Tensor = field(compare=False)

    @classmethod
    @lru_cache(maxsize=64)
    def of(
        cls, deal: Deal, sizes: tuple[int, ...], budget: float, device: torch.device
    ) -> "Capacities":
        """Return the capacities for ``budget`` bytes per supergroup.

        Args:
            deal: The tiles.
            sizes: Bytes of a supergroup at each width, ascending: never less than the first, never
                more than the last.
            budget: Bytes per supergroup.
            device: Of the tables.
        """
        least, most = sizes[0], sizes[-1]
        budget = min(max(budget, least), most)
        counts = deal.counts()
        per_deal = len(counts) // deal.deals
        dealt = [counts[i : i + per_deal] for i in range(0, len(counts), per_deal)]
        if per_deal == 1:  # as with thousands of ranks, where each list of one takes time
            rows, missing = tuple(counts), [0] * len(counts)
        else:
            rows = tuple(max(tiles, default=0) for tiles in dealt)
            missing = [r - count for r, tiles in zip(rows, dealt, strict=True) for count in tiles]
        ample = min(rows, default=0) * (budget - least) >= _AMPLE_BYTES
        grain = ALIGNMENT if ample and budget < most else 1
        gap = most if budget == most else least // grain * grain
        before = (*accumulate(missing, initial=0),)
        places = torch.arange(len(before), device=device)
        return cls(
            rows,
            _mean_bytes(dealt, sizes, budget, (gap, grain)),
            gap,
            grain,
            before,
            places,
            torch.tensor(before).to(device) * gap,
        )

    @cached_property
    def rows_and_last(self) -> tuple[Tensor, Tensor]:
        """int64[deals] each: supergroups of a full tile; bytes that only full tiles have."""
        per_deal = (len(self.missing) - 1) // max(1, len(self.rows))
        ends = self.missing[:: max(1, per_deal)]
        last = [self.gap if a < b else 0 for a, b in pairwise(ends)][: len(self.rows)]
        device = self.places.device
        return torch.tensor(self.rows).to(device), torch.tensor(last).to(device)

    @property
    def full(self) -> tuple[tuple[int, int], ...]:
        """Supergroups of a full tile, and its mean bytes, by deal."""
        return tuple(zip(self.rows, self.mean, strict=True))

    def nbytes(self, full: int, first: int, last: int) -> int:
        """Return the bytes of tiles first to last if a full one has ``full``."""
        return full * (last - first) - self.gap * (self.missing[last] - self.missing[first])

    def offsets(self, full: int, first: int, last: int) -> Tensor:
        """Return where these tiles begin and end, int64[last - first + 1]."""
        here = slice(first, last + 1)
        return self.places[here] * full - self.gaps[here]


def _mean_bytes(
    dealt: Sequence[Sequence[int]], sizes: Sequence[int], budget: float, rounding: tuple[int, int]
) -> tuple[int, ...]:
    """Return the bytes of a full tile, by deal, with which all tiles meet the budget.

    What small tiles cannot spend on a step is carried from deal to deal.
    """
    least = sizes[0]
    gap, grain = rounding
    step = math.gcd(*(size - least for size in sizes)) or 1
    seen, used, mean = 0, 0, []
    for tiles, alike in groupby(dealt):
        count, full, held = len(tiles), max(tiles, default=0), sum(tiles)
        gaps, narrowest = (full * count - held) * gap, full * least
        for _ in alike:
            seen += held
            room = math.floor(seen * budget) - used + gaps
            size = max(narrowest, room // max(1, count))
            if grain > 1:
                size = size // grain * grain
            else:
                size -= (size - narrowest) % step
            mean.append(size)
            used += size * count - gaps
    return tuple(mean)
