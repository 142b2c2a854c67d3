"""Which rows get how many bits: the least modelled error for a fixed number of bytes.

A *row* is the k-th supergroup of every tile of a deal. Supergroups are dealt in the order of their
energy, so those of a row are nearly alike and get the same width, and all tiles have the same
cuts. A row of weight W takes a step to the next width if W is at least the step's *worth* times a
price, and the price is the one at which the bytes are used up. One kernel does what would be a
hundred torch operations.
"""

import torch
from torch import Tensor

from dynamiq.core.errors import InputError
from dynamiq.kernels.allocation import arguments, reference
from dynamiq.kernels.allocation.steps import Steps
from dynamiq.kernels.builds import check_memory, find_build

_WORK_NUMBERS = 1 << 19
"""Prices that are held at once, or those of one list of rows."""


def fill(weights: Tensor, room: Tensor, steps: Steps, *, shared: bool) -> Tensor:
    """Return how many rows take each step.

    Deterministic; the same on every rank and device for the same weights. Optimal but for the
    last step that does not fit, and for the order of steps that pay at prices less than 2 % apart.

    Args:
        weights: float64[d, r]; 0 marks rows that get no bits, the last ones.
        room: Bytes, enough for the narrowest width: int64[d, 1] if classes share them, or
            int64[d, h].
        steps: Worth and costs.
        shared: Whether classes share the room; each one's bytes then count ``transfers`` times.

    Returns:
        int64[d, h, s], non-increasing in the last dimension; the first is the number of rows of
        positive weight.

    Raises:
        InputError: Shapes, dtypes or devices do not fit together.
    """
    deals, rows = weights.shape
    classes, count, band_count = steps.worth.shape
    weights, room = weights.contiguous(), room.contiguous()
    _check(weights, room, steps, shared=shared)
    run = find_build("allocation", None, weights.device)
    if run is None:
        return reference.fill(weights, room, steps, shared=shared)
    cuts = torch.empty(deals, classes, count, dtype=torch.int64, device=weights.device)
    # In blocks that use the same memory again: on a CPU, new pages take as long as the search.
    block = min(deals, 1 + _WORK_NUMBERS // max(1, classes * count * rows))
    prices = weights.new_empty(block, classes, count, rows)
    more = torch.empty_like(cuts[:block])
    times = steps.transfers if shared else torch.ones_like(steps.transfers)
    costs = times[:, None] * steps.bytes
    bands = room.new_zeros(rows) if steps.bands is None else steps.bands
    for first in range(0, deals, max(1, block)):
        here = slice(first, first + block)
        tensors = (weights[here], steps.worth, bands, costs, room[here], prices, more, cuts[here])
        places = [tensor.data_ptr() for tensor in tensors]
        held = len(tensors[0])
        run(
            "fill",
            arguments.Fill(*places, classes, count, rows, band_count, shared),
            held if shared else held * classes,
        )
    return cuts


def _check(weights: Tensor, room: Tensor, steps: Steps, *, shared: bool) -> None:
    device = weights.device
    check_memory("weights", weights, (torch.float64,), device)
    check_memory("worth", steps.worth, (torch.float64,), device)
    integers = {"room": room, "bytes": steps.bytes, "transfers": steps.transfers}
    if steps.bands is not None:
        integers["bands"] = steps.bands
    for name, tensor in integers.items():
        check_memory(name, tensor, (torch.int64,), device)
    classes, count, band_count = steps.worth.shape
    rows = weights.shape[1]
    if band_count != 1 if steps.bands is None else steps.bands.shape != (rows,):
        raise InputError(f"worth has {band_count} bands, and {rows} rows need as many band numbers")
    expected = (len(weights), 1 if shared else classes)
    if room.shape != expected or len(steps.bytes) != count or len(steps.transfers) != classes:
        raise InputError(
            f"{len(weights)} lists of rows and {classes} classes of {count} steps need room "
            f"{list(expected)}, {count} bytes and {classes} transfers, got {list(room.shape)}, "
            f"{len(steps.bytes)} and {len(steps.transfers)}"
        )
