"""Operands on another device."""

from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def on(device: torch.device | str, value: T) -> T:
    """Return operands, or a whole call, with all of their tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)  # type: ignore[return-value]
    if not is_dataclass(value):
        return value
    moved = {f.name: on(device, getattr(value, f.name)) for f in fields(value) if f.init}
    return replace(value, **moved)
