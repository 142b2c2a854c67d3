"""Padding, units and chunks: all index arithmetic, no floats.

Letters used for shapes throughout dynamiq:

* d: entries of a tensor; n: ranks (world_size); u: units of the padded bucket;
* p: positions of a chunk (units per chunk); s: supergroups; k: rows of a batch.

The *padded bucket* is float[n * p * unit]: chunk c owns its entries [c * p * unit, (c+1) * p *
unit), the true ones first. An entry's index in the padded bucket addresses its randomness, so
neither an order chosen by the compressor nor segments change a bit of the result.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from dynamiq.core.errors import InputError


@dataclass(frozen=True)
class Layout:
    """How d entries are cut into n chunks of whole units.

    Attributes:
        numel: Entries d of the flat tensor.
        world_size: Number of chunks n.
        unit: Entries that a compressor treats as one (1, 32, 256, ...).
        bounds: n + 1 chunk boundaries given from outside (rank r owns slice r), each slice padded
            for itself; or None, and the padded bucket is cut evenly.

    Raises:
        InputError: Bounds that do not split [0, numel] into n slices.
    """

    numel: int
    world_size: int
    unit: int = 1
    bounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the bounds."""
        b = self.bounds
        if b is None:
            return
        if (
            len(b) != self.world_size + 1
            or (b[0], b[-1]) != (0, self.numel)
            or any(lo > hi for lo, hi in pairwise(b))
        ):
            raise InputError(
                f"bounds {b} do not split {self.numel} entries into {self.world_size} slices; give "
                f"{self.world_size + 1} non-decreasing offsets from 0 to {self.numel}"
            )

    @cached_property
    def positions(self) -> int:
        """Units per chunk p, the largest chunk's when bounds are given."""
        if self.bounds is None:
            return -(-(-(-self.numel // self.unit)) // self.world_size)
        return max(-(-self.slice_numel(c) // self.unit) for c in range(self.world_size))

    @property
    def chunk_numel(self) -> int:
        """Entries of a padded chunk."""
        return self.positions * self.unit

    @property
    def padded_numel(self) -> int:
        """Entries of the padded bucket."""
        return self.world_size * self.chunk_numel

    @cached_property
    def units(self) -> int:
        """Units that hold at least one true entry."""
        if self.bounds is None:
            return -(-self.numel // self.unit)
        return sum(-(-self.slice_numel(c) // self.unit) for c in range(self.world_size))

    def slice_bounds(self, chunk: int) -> tuple[int, int]:
        """Return where a chunk's true entries begin and end in the flat tensor."""
        if self.bounds is not None:
            return self.bounds[chunk], self.bounds[chunk + 1]
        start = chunk * self.chunk_numel
        return min(start, self.numel), min(start + self.chunk_numel, self.numel)

    def slice_numel(self, chunk: int) -> int:
        """Return how many true entries a chunk has."""
        start, stop = self.slice_bounds(chunk)
        return stop - start

    def slice_offsets(self) -> Tensor:
        """Return int64[n + 1]: chunk c holds the flat tensor's entries offsets[c] to [c + 1]."""
        return torch.tensor(
            [*(self.slice_bounds(c)[0] for c in range(self.world_size)), self.numel]
        )

    def true_entries(self) -> Tensor:
        """Return int64[n * p]: how many true entries each unit of the padded bucket has."""
        starts = torch.arange(self.positions) * self.unit
        counts = [
            (self.slice_numel(c) - starts).clamp(0, self.unit) for c in range(self.world_size)
        ]
        return torch.cat(counts)

    def pad(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x[d] as dtype[n, p * unit], zeros in the padding; always a copy."""
        padded = torch.zeros(self.world_size, self.chunk_numel, dtype=dtype, device=x.device)
        if self.bounds is None:
            padded.view(-1)[: self.numel].copy_(x)
        else:
            for c in range(self.world_size):
                start, stop = self.slice_bounds(c)
                padded[c, : stop - start].copy_(x[start:stop])
        return padded

    def unpad(self, padded: Tensor, out: Tensor) -> None:
        """Copy the true entries of dtype[n, p * unit] into out[d]."""
        if self.bounds is None:
            out.copy_(padded.reshape(-1)[: self.numel])
        else:
            for c in range(self.world_size):
                start, stop = self.slice_bounds(c)
                out[start:stop].copy_(padded[c, : stop - start])
