"""The kernels' arguments as they lie in memory: the same bytes for every build.

Mirrors the structures of ``source/hadamard``, field by field. A structure holds addresses only;
whoever makes it keeps the tensors alive until the kernel has run.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from dynamiq.kernels.hadamard import operands
from dynamiq.kernels.hadamard.reference import neighbours
from dynamiq.kernels.kept import kept

_PAD = 32
"""Tables end at multiples of so many values: the host looks up 16 or 32 at a time."""


class Integers(ctypes.Structure):
    """``Integers`` of integers.cuh."""

    _fields_ = (
        ("memory", c_void_p),
        ("bytes", c_int32),
        ("offset", c_int32),
    )

    @classmethod
    def of(cls, codes: Tensor, offset: int = 0) -> "Integers":
        """Return the address of integers."""
        return cls(codes.data_ptr(), codes.element_size(), offset)


class Rotated(ctypes.Structure):
    """``Rotated`` of rotated.cuh."""

    _fields_ = (
        ("values", c_void_p),
        ("integers", Integers),
    )

    @classmethod
    def of(cls, tensor: Tensor, offset: int = 0) -> "Rotated":
        """Return the address of float32, or of integers."""
        if tensor.is_floating_point():
            return cls(tensor.data_ptr(), Integers())
        return cls(None, Integers.of(tensor, offset))


class Blocks(ctypes.Structure):
    """``Blocks`` of rotated.cuh."""

    _fields_ = (
        ("factor", c_void_p),
        ("scale", c_void_p),
        ("signs", c_uint64),
        ("first_unit", c_int64),
        ("log_block", c_int64),
    )

    @classmethod
    def of(cls, blocks: operands.Blocks) -> "Blocks":
        """Return the addresses of what belongs to blocks."""
        b = blocks
        return cls(b.factor.data_ptr(), b.scale.data_ptr(), b.signs, b.first_unit, b.log_block)


class Quantizer(ctypes.Structure):
    """``Quantizer`` of integers.cuh."""

    _fields_ = (
        ("key", c_uint64),
        ("first_unit", c_int64),
        ("lows", c_void_p),
        ("gaps", c_void_p),
        ("table_size", c_int32),
        ("top", c_float),
    )

    @classmethod
    def of(
        cls, quantizer: operands.Quantizer, first_unit: int, device: torch.device
    ) -> "Quantizer":
        """Return the addresses of a quantiser's table, which stays alive for the next calls."""
        if quantizer.table is None:
            return cls(quantizer.key, first_unit, None, None, 0, quantizer.top)
        lows, gaps = _tables(quantizer.table, device)
        places = (lows.data_ptr(), gaps.data_ptr(), quantizer.top + 1)
        return cls(quantizer.key, first_unit, *places, quantizer.top)


class Energies(ctypes.Structure):
    """Arguments of energies.cu."""

    _fields_ = (
        ("entries", c_void_p),
        ("numel", c_int64),
        ("energies", c_void_p),
    )


class Rotate(ctypes.Structure):
    """Arguments of rotate.cu."""

    _fields_ = (
        ("entries", c_void_p),
        ("numel", c_int64),
        ("blocks", Blocks),
        ("to", Rotated),
        ("quantizer", Quantizer),
    )


class Mix(ctypes.Structure):
    """Arguments of mix.cu."""

    _fields_ = (
        ("from_", Rotated),
        ("to", Rotated),
        ("blocks", Blocks),
        ("quantizer", Quantizer),
        ("log_stride", c_int32),
        ("log_points", c_int32),
    )


class RotateBack(ctypes.Structure):
    """Arguments of rotate_back.cu."""

    _fields_ = (
        ("from_", Rotated),
        ("blocks", Blocks),
        ("entries", c_void_p),
        ("numel", c_int64),
        ("divisor", c_float),
        ("limit", c_float),
    )


class Carry(ctypes.Structure):
    """Arguments of carry.cu."""

    _fields_ = (
        ("payload", c_void_p),
        ("integers", Integers),
        ("out", c_void_p),
        ("bits", c_int32),
        ("out_bits", c_int32),
        ("adds", c_int32),
        ("writes", c_int32),
    )


@kept
def _tables(table: tuple[int, ...], device: torch.device) -> Tensor:
    """Return float32[2, m]: the neighbours of 0 to g, m a multiple of what is looked up at once."""
    found = neighbours(table)
    return torch.nn.functional.pad(found, (0, -found.shape[1] % _PAD)).to(device)
