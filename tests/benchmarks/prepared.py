"""A kernel with all of its memory: what the benchmarks time, and what traffic is checked against.

Each family has a module with ``prepare``; ``ROUNDING``, the kernels that round; ``ROUNDINGS``, how
they can; and ``DEFAULT``, how they do unless something else is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from dynamiq.kernels.registry import ENTRY_DTYPES

FORMATS = {name: dtype for dtype, name in ENTRY_DTYPES.items()}


@dataclass(frozen=True)
class Prepared:
    """One call.

    Attributes:
        run: Makes it.
        entries: What a copy copies.
        read: All that grows with the entries and is read.
        written: All that grows with them and is written.
    """

    run: Callable[[], object]
    entries: Tensor
    read: tuple[Tensor, ...]
    written: tuple[Tensor, ...]


@cache
def entries_like_gradients(numel: int, dtype: torch.dtype) -> Tensor:
    """Return entries of which groups of 16, and of 256, have scales of their own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator)
    for size, spread in ((16, 1.0), (256, 2.0)):
        scales = torch.exp(spread * torch.randn(numel // size, generator=generator))
        x *= scales.repeat_interleave(size)
    return x.to(dtype)
