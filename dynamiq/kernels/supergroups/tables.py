"""The quantiser's numbers as the tables that kernels search and look up.

For a ratio a, ``starts`` of its cell says which level is at or below the cell's beginning; then
``next`` is compared ``steps`` times, once for each level that may lie inside a cell. The result
is exactly that of a binary search. Dithered codes need no search, but three numbers each.
"""

from dataclasses import astuple, dataclass
from itertools import pairwise

import torch
from torch import Tensor

from dynamiq.kernels.kept import kept
from dynamiq.kernels.supergroups.dither import expansion
from dynamiq.kernels.supergroups.wire import Quantizer

_PAD = 16
"""Tables begin and end at multiples of so many values: the host looks up 16 at a time."""


@dataclass(frozen=True)
class Tables:
    """All widths of a quantiser.

    Attributes:
        values: float32[m], all tables one after the other; the integers of ``starts`` as bits.
        widths: int32[widths, 7]: bits, steps, and where levels, gaps, next, starts and decoded
            values begin; of dithered codes the last one says where Y, α and κ are.
    """

    values: Tensor
    widths: Tensor


@kept
def tables_of(quantizer: Quantizer, device: torch.device) -> Tables:
    """Return the tables of a quantiser on a device."""
    values: list[Tensor] = []
    rows: list[list[int]] = []
    for width, levels in zip(quantizer.widths, quantizer.levels, strict=True):
        if width == 16:
            rows.append([16] + [0] * 6)
            continue
        if quantizer.rounding == "dithered":
            rows.append([width, 0, 0, 0, 0, 0, sum(v.numel() for v in values)])
            values.append(_padded(torch.tensor(astuple(expansion(width)), dtype=torch.float32)))
            continue
        cells = 2 ** (width + 1)
        search, steps = _search(levels, cells)
        begins = []
        for part in (*search, signed_levels(levels, width)):
            begins.append(sum(v.numel() for v in values))
            values.append(_padded(part))
        rows.append([width, steps, *begins])
    together = torch.cat(values) if values else torch.zeros(_PAD, dtype=torch.float32)
    widths = torch.tensor(rows, dtype=torch.int32)
    return Tables(together.to(device), widths.to(device))


def signed_levels(levels: tuple[float, ...], width: int) -> Tensor:
    """Return the value float32[2^width] of each code; the last, unused one repeats the largest."""
    if width == 1:
        return torch.tensor([-1.0, 1.0], dtype=torch.float32)
    negative = [-level for level in reversed(levels[1:])]
    return torch.tensor([*negative, *levels, levels[-1]], dtype=torch.float32)


def _search(levels: tuple[float, ...], cells: int) -> tuple[list[Tensor], int]:
    """Return levels, gaps and next levels float32[R], starts as float bits; and the steps."""
    exact = torch.tensor(levels, dtype=torch.float32)
    inner = exact[1:-1].contiguous()
    starts = torch.bucketize(torch.arange(cells, dtype=torch.float32) / cells, inner, right=True)
    steps = max(b - a for a, b in pairwise([*starts.tolist(), len(inner)]))
    following = torch.cat([inner, torch.tensor([torch.inf], dtype=torch.float32)])
    bits = starts.to(torch.int32).view(torch.float32)
    return [exact[:-1], exact.diff(), following, bits], steps


def _padded(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values, (0, -len(values) % _PAD))
