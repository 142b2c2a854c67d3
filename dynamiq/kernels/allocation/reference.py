"""What the operation gives, in torch operations: the specification of the kernel.

The price is the one at which the bytes are used up, found on the bits of its floating-point number.
"""

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.kernels.allocation.steps import Steps

_CANDIDATES = 8
"""Prices that are tried at once."""
_ROUNDS = 5
"""As many as narrow the range of prices down to one part in 64."""
_LEAST_PRICE, _GREATEST_PRICE = (
    int.from_bytes(struct.pack(">d", 2.0**exponent)) for exponent in (-300, 300)
)


def fill(weights: Tensor, room: Tensor, steps: Steps, *, shared: bool) -> Tensor:
    """See :func:`dynamiq.kernels.allocation.ops.fill`."""
    market = _Market.of(weights, steps, shared=shared)
    live = (weights > 0).sum(1)
    room = room - live[:, None] * market.first_cost
    first = live[:, None, None].expand(-1, *market.costs.shape[:1], 1)
    if not market.costs.shape[1]:
        return first.contiguous()
    ladder = torch.arange(_CANDIDATES + 1, device=weights.device)
    low, high = torch.full_like(room, _LEAST_PRICE), torch.full_like(room, _GREATEST_PRICE)
    for _ in range(_ROUNDS):
        stride = (high - low) // _CANDIDATES + 1
        tried = torch.minimum(low[..., None] + stride[..., None] * ladder, high[..., None])
        cost = market.cost(market.bought(tried[..., 1:]))
        too_low = (cost > room[..., None]).sum(2, keepdim=True)
        low, high = tried.gather(2, too_low)[..., 0], tried.gather(2, too_low + 1)[..., 0]
    # What is bought at the one price but not at the other pays nearly the same.
    cuts, more = market.bought(torch.stack([high, low], dim=2)).unbind(3)
    afforded = market.afforded(more - cuts, room - market.cost(cuts[..., None])[..., 0])
    cuts = torch.cat([first, cuts + afforded], dim=2).cummin(2).values
    if not market.shared:
        market.spend_change(cuts, room - market.cost(cuts[..., 1:, None])[..., 0])
    return cuts


@dataclass(frozen=True)
class _Market:
    """What is bought at which price.

    Attributes:
        ascending: float64[d, h, s - 1, r], the prices up to which rows take each step.
        costs: int64[h, s - 1].
        first_cost: int64[1 or h], of the narrowest width.
        shared: Whether all classes share the room.
    """

    ascending: Tensor
    costs: Tensor
    first_cost: Tensor
    shared: bool

    @classmethod
    def of(cls, weights: Tensor, steps: Steps, *, shared: bool) -> "_Market":
        # Widths do not increase from row to row.
        worth = steps.worth[:, 1:]
        if steps.bands is not None:
            worth = worth[:, :, steps.bands]
        pays = (weights[:, None, None] / worth).cummin(3).values
        times = steps.transfers[:, None] if shared else torch.ones_like(steps.transfers)[:, None]
        costs = steps.bytes * times
        first = costs[:, 0].sum().view(1) if shared else costs[:, 0]
        return cls(pays.flip(3).contiguous(), costs[:, 1:], first, shared)

    def bought(self, prices: Tensor) -> Tensor:
        """Return int64[d, h, s - 1, k] for the bits of prices, int64[d, 1 or h, k]."""
        d, h, s, rows = self.ascending.shape
        least = prices.view(torch.float64)[:, :, None].expand(d, h, s, -1).contiguous()
        return rows - torch.searchsorted(self.ascending, least)

    def cost(self, counts: Tensor) -> Tensor:
        """Return int64[d, 1 or h, k] bytes."""
        each = (counts * self.costs[..., None]).sum(2)
        return each.sum(1, keepdim=True) if self.shared else each

    def spend_change(self, cuts: Tensor, room: Tensor) -> None:
        """Add to int64[d, h, s] cuts the dearest steps that still fit, where costs differ."""
        costs = self.costs[0].tolist()
        if len(set(costs)) == 1:
            return
        for step in sorted(range(1, len(costs) + 1), key=lambda s: -costs[s - 1]):
            # A step that never pays gives a greater error.
            pays = (self.ascending[:, :, step - 1] > 0).any(2)
            fits = torch.minimum(room // costs[step - 1], cuts[..., step - 1] - cuts[..., step])
            fits = torch.where(pays, fits, 0)
            cuts[..., step] += fits
            room = room - fits * costs[step - 1]

    def afforded(self, more: Tensor, room: Tensor) -> Tensor:
        """Return how many of the steps int64[d, h, s - 1] fit, class by class, width by width."""
        wanted = more * self.costs
        if self.shared:
            wanted = wanted.flatten(1)[:, None]
        left = (room[..., None] - wanted.cumsum(2) + wanted).clamp(min=0)
        return torch.minimum(left.view_as(more) // self.costs, more)
