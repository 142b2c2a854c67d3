"""Which build of a family of kernels runs for a dtype on a device, and what memory they accept."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from dynamiq.core.errors import InputError
from dynamiq.kernels import host
from dynamiq.kernels.registry import ENTRY_DTYPES

Run = Callable[[str, ctypes.Structure, int], None]
"""Runs a kernel, by name, on a number of supergroups, with its structure of arguments."""


def find_build(family: str, dtype: torch.dtype | None, device: torch.device) -> Run | None:
    """Return what runs a family's kernels; None, after a warning, where only the reference can.

    Args:
        family: Name of the folder.
        dtype: Of entries; None for kernels that read none.
        device: Of all tensors.
    """
    entry_format = None if dtype is None else ENTRY_DTYPES[dtype]
    if device.type == "cpu":
        library = host.library(family, entry_format)
        return None if library is None else library.run
    from dynamiq.kernels import launch

    return launch.launcher(family, entry_format, device)


def check_memory(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse what a kernel could not read or write where it is.

    Raises:
        InputError: The tensor has another dtype or device, gaps, or a value that is not in memory.
    """
    here = tensor.device == device and not (tensor.is_neg() or tensor._is_zerotensor())
    if tensor.dtype not in dtypes or not tensor.is_contiguous() or not here:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise InputError(
            f"{name} must be contiguous {names} on {device}, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
