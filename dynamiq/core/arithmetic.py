"""Arithmetic that gives the same bits on every device."""

import torch
from torch import Tensor


def divide(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor, each quotient rounded once, in the dtype of x.

    On CUDA, torch multiplies by the reciprocal when a divisor is a Python number.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)
