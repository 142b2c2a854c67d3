"""Which supergroup gets how many bits: exact thresholds under a fixed number of bytes.

Model: the squared error of a supergroup of energy F at w bits is proportional to F · 4^-w. A step
from width a to width c gains F · (4^-a - 4^-c) and costs c - a bits; equal gain per bit at every
boundary gives the thresholds of DynamiQ §3.2, and one free scalar, which is chosen such that the
bytes are used up. Found exactly by sorting all steps, not by search.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from dynamiq.kernels.wire import ALIGNMENT, supergroup_bytes

_AMPLE_BYTES = 4096
"""Where a tile has so many to give away, less than a step and a multiple are no loss."""


def capacities(counts: Sequence[int], widths: Sequence[int], supergroup_budget: float) -> list[int]:
    """Return the payload bytes of every tile, from numbers known before any data.

    All widths that ``supergroup_budget`` bytes per supergroup pay for can be used; remainders are
    carried from tile to tile. Tiles have a multiple of 16 bytes, but for small ones and for budgets
    next to the least, where that would cost a step.

    Args:
        counts: Supergroups of each tile.
        widths: Bit widths, ascending.
        supergroup_budget: Bytes per supergroup for codes and scales, at least the narrowest's.
    """
    sizes = [supergroup_bytes(w) for w in widths]
    least, most = sizes[0], sizes[-1]
    grain = math.gcd(*(size - least for size in sizes)) or 1
    spare = min(supergroup_budget, most) - least
    tiles, seen, used = [], 0, 0
    for count in counts:
        seen += count
        room = math.floor(seen * (least + spare)) - used
        grains = max(0, (room - count * least) // grain)
        size = count * least + grains * grain
        if grains * grain >= _AMPLE_BYTES:
            size = min(room // ALIGNMENT, -(-count * most // ALIGNMENT)) * ALIGNMENT
        tiles.append(size)
        used += size
    return tiles


def threshold_cuts(energies: Tensor, capacity: Tensor, widths: Sequence[int]) -> Tensor:
    """Return how many supergroups of each tile get at least each width.

    Steps are taken in order of gain per bit, ties at the narrower width and the earlier position
    first, as long as they fit; what is left then buys the dearest steps that still fit.
    Deterministic; the same on every rank for the same energies.

    Args:
        energies: float64[t, s], descending in each row; 0 marks supergroups that get no bits.
        capacity: int64[t] bytes of each tile, enough for the narrowest width everywhere.
        widths: Bit widths, ascending.

    Returns:
        int64[t, widths], non-increasing in each row.
    """
    sizes = [supergroup_bytes(w) for w in widths]
    nonzero = (energies > 0).sum(1)
    cuts = nonzero[:, None].repeat(1, len(widths))
    cuts[:, 1:] = 0
    room = capacity - nonzero * sizes[0]
    costs = [after - before for before, after in pairwise(sizes)]
    if not costs:
        return cuts
    cuts[:, 1:] = _affordable_steps(energies, room, widths, costs)
    for step, cost in enumerate(costs):
        room = room - cuts[:, step + 1] * cost
    for step in sorted(range(len(costs)), key=lambda i: -costs[i]):
        more = torch.minimum(room // costs[step], cuts[:, step] - cuts[:, step + 1])
        cuts[:, step + 1] += more
        room = room - more * costs[step]
    return cuts


def _affordable_steps(
    energies: Tensor, room: Tensor, widths: Sequence[int], costs: Sequence[int]
) -> Tensor:
    """Return int64[t, steps]: how often each step is among the best that fit together."""
    steps = list(pairwise(widths))
    gains = torch.cat([energies * ((4.0**-a - 4.0**-c) / (c - a)) for a, c in steps], dim=1)
    kind = torch.arange(len(steps), device=energies.device).repeat_interleave(energies.shape[1])
    cost = torch.cat([kind.new_full((energies.shape[1],), cost) for cost in costs])
    order = gains.argsort(dim=1, descending=True, stable=True)
    spent = cost[order].cumsum(1)
    taken = (spent <= room[:, None]) & (gains.gather(1, order) > 0)
    counts = torch.zeros(len(energies), len(steps), dtype=torch.int64, device=energies.device)
    return counts.scatter_add_(1, kind[order], taken.long())
