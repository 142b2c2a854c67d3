"""Arithmetic that gives the same bits on every device and machine."""

import torch
from torch import Tensor


def divide(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor, each quotient rounded once, in the dtype of x.

    On CUDA, torch multiplies by the reciprocal when a divisor is a Python number.
    """
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def split_divisor(divisor: int) -> tuple[float, float]:
    """Return a power of two, not below the divisor, and what is left to divide by.

    Entries that are divided by the first before they are summed keep all their bits, but for
    subnormal numbers, and no sum of so many leaves their range.
    """
    first = 2.0 ** (divisor - 1).bit_length()
    return first, divisor / first


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in a narrower dtype, each value rounded once, or x itself if it is in that dtype.

    NaN becomes the dtype's usual one: torch's own casts leave other bits where they are vectorised.
    """
    if x.dtype == dtype:
        return x
    narrow = x.to(dtype)
    return narrow.masked_fill_(narrow.isnan(), torch.nan)


def tree_sum(x: Tensor) -> Tensor:
    """Sum the last dimension over a binary tree: the second half is added to the first, and so on.

    What torch.sum adds first depends on the machine.
    """
    while x.shape[-1] > 1:
        half = (x.shape[-1] + 1) // 2
        rest = x.shape[-1] - half
        head = x[..., :rest] + x[..., half:]
        x = head if rest == half else torch.cat([head, x[..., rest:half]], dim=-1)
    return x[..., 0]


def descending_order(keys: Tensor) -> Tensor:
    """Return the indices int64[k] that sort int16[k] keys, none negative, largest first.

    Stable: ties stay in the order of their indices. NumPy's radix sort takes a tenth of the time
    of torch's sort on a CPU.
    """
    if keys.device.type != "cpu":
        return keys.argsort(descending=True, stable=True)
    return torch.from_numpy((torch.iinfo(torch.int16).max - keys).numpy().argsort(kind="stable"))
