"""What a collective accepts; everything else is refused before a byte moves."""

from typing import Literal, get_args

import torch
from torch import Tensor

from dynamiq.core.errors import InputError

Op = Literal["mean", "sum"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_op(op: str) -> None:
    """Raise InputError unless the op is one we have."""
    if op not in get_args(Op):
        raise InputError(f"unknown op {op!r}; there are {', '.join(map(repr, get_args(Op)))}")


def check_tensor(tensor: Tensor, name: str = "tensor", *, written: bool = True) -> None:
    """Raise InputError unless the tensor is real, floating, dense, and safe to be written."""
    if not isinstance(tensor, Tensor):
        raise InputError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    what = f"{name} {tensor.dtype}{list(tensor.shape)}"
    if tensor.layout is not torch.strided:
        raise InputError(f"{what} is {tensor.layout}; only dense tensors are reduced: to_dense()")
    if tensor.dtype not in DTYPES:
        hint = "view_as_real() a complex tensor" if tensor.is_complex() else "convert it first"
        raise InputError(f"{what} is not float32, bfloat16, float16 or float64; {hint}")
    if tensor.device.type == "meta":
        raise InputError(f"{what} is on the meta device and has no data")
    if not written:
        return
    if tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
        raise InputError(
            f"{what} requires grad and would be written in place; reduce its .grad, or call under "
            f"torch.no_grad()"
        )
    if _overlaps(tensor):
        raise InputError(
            f"{what} with strides {tensor.stride()} has entries that share memory (an expanded "
            f"tensor?); it cannot hold a result, make it .contiguous() first"
        )


def check_not_capturing() -> None:
    """Raise InputError inside a CUDA graph capture."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise InputError(
            "a CUDA graph is being captured: the exchange runs in a worker thread and would not be "
            "part of the graph; reduce outside of the captured region"
        )


def _overlaps(tensor: Tensor) -> bool:
    """Return whether two indices may address the same entry (sorted-stride test)."""
    reach = 0
    dims = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    for stride, size in dims:
        if stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False
