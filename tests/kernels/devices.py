"""Operands on another device."""

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def on(device: torch.device | str, value: T) -> T:
    """Return operands, or a whole call, with all of their tensors on a device.

    A tensor is as far from the beginning of its memory as it was, so that alignments are kept.
    """
    if isinstance(value, Tensor):
        offset = value.storage_offset()
        memory = torch.empty(offset + value.numel(), dtype=value.dtype, device=device)
        return memory[offset:].view(value.shape).copy_(value)  # type: ignore[return-value]
    if not is_dataclass(value):
        return value
    moved = {f.name: on(device, getattr(value, f.name)) for f in fields(value) if f.init}
    return replace(value, **moved)
