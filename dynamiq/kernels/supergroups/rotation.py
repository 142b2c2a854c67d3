"""The randomised Hadamard transform of supergroups, as the reference does it.

Random signs, then the orthonormal transform: entries become nearly Gaussian, whatever they were,
so that one scale serves all 256. It is linear, so that partial sums are never rotated again.
"""

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.kernels.supergroups.wire import GROUP, GROUPS, SUPERGROUP


def rotate(x: Tensor, units: Tensor, signs: int) -> Tensor:
    """Rotate float32[k, 256], the supergroups of int64[k] units of the padded bucket."""
    return _hadamard(_signed(x, units, signs))


def rotate_back(x: Tensor, units: Tensor, signs: int) -> Tensor:
    """Undo :func:`rotate`, but for rounding."""
    return _signed(_hadamard(x), units, signs)


def _signed(x: Tensor, units: Tensor, signs: int) -> Tensor:
    """Change the sign of entry 16 g + l where bit l of the block's word g is set."""
    words = randomness.words(signs, units, GROUPS)[:, :, None]
    bits = words >> torch.arange(GROUP, dtype=torch.int32, device=x.device)
    return torch.where(bits.bitwise_and(1).view(-1, SUPERGROUP) == 1, -x, x)


def _hadamard(x: Tensor) -> Tensor:
    """Add and subtract entries at the distances 1, 2, 4, ... 128; then divide by 16."""
    distance = 1
    while distance < SUPERGROUP:
        pairs = x.view(-1, SUPERGROUP // (2 * distance), 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([a + b, a - b], dim=2).view(-1, SUPERGROUP)
        distance *= 2
    return x * (1 / 16)
