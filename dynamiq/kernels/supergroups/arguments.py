"""The kernels' arguments as they lie in memory: the same bytes for every build.

Mirrors the structures of ``source/*.cuh`` and ``source/*.cu``, field by field. A structure holds
addresses only; whoever makes it keeps the tensors alive until the kernel has run.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_uint64, c_void_p

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.core.randomness import Stream
from dynamiq.kernels.supergroups import operands, wire
from dynamiq.kernels.supergroups.tables import tables_of

_ROUNDINGS = {"nearest": 0, "stochastic": 1, "correlated": 2, "dithered": 3}
_GROUP_SCALES = {None: 0, "stochastic": 1, "up": 2}


class Bucket(ctypes.Structure):
    """``Bucket`` of bucket.cuh."""

    _fields_ = (
        ("entries", c_void_p),
        ("slices", c_void_p),
        ("positions", c_int64),
        ("origin", c_int64),
    )

    @classmethod
    def of(cls, bucket: operands.Bucket) -> "Bucket":
        """Return the addresses of a bucket."""
        return cls(_at(bucket.entries), _at(bucket.slices), bucket.positions, bucket.origin)


class Rotation(ctypes.Structure):
    """``Rotation`` of rotation.cuh."""

    _fields_ = (
        ("signs", c_uint64),
        ("is_on", c_int64),
    )

    @classmethod
    def of(cls, signs: int | None) -> "Rotation":
        """Return a rotation by these signs, or none."""
        return cls(signs or 0, signs is not None)


class Values(ctypes.Structure):
    """``Values`` of operands.cuh."""

    _fields_ = (
        ("bucket", Bucket),
        ("factor", c_void_p),
        ("shift", c_void_p),
        ("sums", c_void_p),
        ("rotation", Rotation),
    )

    @classmethod
    def of(cls, values: operands.Values) -> "Values":
        """Return the addresses of partial sums."""
        sums = None if values.sums is None else _at(values.sums)
        rotation = Rotation.of(values.signs)
        return cls(Bucket.of(values.bucket), _at(values.factor), _at(values.shift), sums, rotation)


class Result(ctypes.Structure):
    """``Result`` of operands.cuh."""

    _fields_ = (
        ("bucket", Bucket),
        ("factor", c_void_p),
        ("offset", c_void_p),
        ("divisor", c_float),
        ("limit", c_float),
        ("rotation", Rotation),
    )

    @classmethod
    def of(cls, result: operands.Result) -> "Result":
        """Return the addresses of a result."""
        places = (Bucket.of(result.bucket), _at(result.factor), _at(result.offset))
        return cls(*places, result.divisor, result.limit, Rotation.of(result.signs))


class Address(ctypes.Structure):
    """``Address`` of wire.cuh: keys of randomness, folded as far as the host knows them."""

    _fields_ = (
        ("entries", c_uint64),
        ("group_scales", c_uint64),
        ("strata", c_uint64),
        ("sender", c_int32),
        ("world_size", c_int32),
    )

    @classmethod
    def of(cls, address: wire.Address) -> "Address":
        """Return the keys of an address."""
        a = address
        return cls(
            randomness.key(a.seed, a.call, Stream.ENTRY, a.hop, a.sender),
            randomness.key(a.seed, a.call, Stream.GROUP_SCALE, a.hop, a.sender),
            randomness.key(a.seed, a.call, Stream.STRATUM),
            a.sender,
            a.world_size,
        )


class Tiles(ctypes.Structure):
    """``Tiles`` of wire.cuh."""

    _fields_ = (
        ("units", c_void_p),
        ("cuts", c_void_p),
        ("offsets", c_void_p),
        ("size", c_int64),
        ("address", Address),
    )

    @classmethod
    def of(cls, tiles: wire.Tiles) -> "Tiles":
        """Return the addresses of tiles."""
        places = (_at(tiles.units), _at(tiles.cuts), _at(tiles.offsets), tiles.units.shape[1])
        return cls(*places, Address.of(tiles.address))


class Quantizer(ctypes.Structure):
    """``Quantizer`` of quantizer.cuh, with its ``Widths``."""

    _fields_ = (
        ("widths", c_void_p),
        ("width_count", c_int64),
        ("tables", c_void_p),
        ("rounding", c_int32),
        ("group_scales", c_int32),
    )

    @classmethod
    def of(cls, quantizer: wire.Quantizer, device: torch.device) -> "Quantizer":
        """Return the addresses of a quantiser's tables, which stay alive for the next calls."""
        tables = tables_of(quantizer, device)
        return cls(
            _at(tables.widths),
            len(quantizer.widths),
            _at(tables.values),
            _ROUNDINGS[quantizer.rounding],
            _GROUP_SCALES[quantizer.group_scales],
        )


class Statistics(ctypes.Structure):
    """Arguments of statistics.cu."""

    _fields_ = (
        ("bucket", Bucket),
        ("energy", c_void_p),
        ("mean", c_void_p),
        ("limit", c_float),
    )


class Compress(ctypes.Structure):
    """Arguments of compress.cu."""

    _fields_ = (
        ("values", Values),
        ("tiles", Tiles),
        ("quantizer", Quantizer),
        ("payload", c_void_p),
    )


class Decompress(ctypes.Structure):
    """Arguments of decompress.cu."""

    _fields_ = (
        ("payload", c_void_p),
        ("result", Result),
        ("tiles", Tiles),
        ("quantizer", Quantizer),
    )


class DecompressAccumulate(ctypes.Structure):
    """Arguments of decompress_accumulate.cu."""

    _fields_ = (
        ("payload", c_void_p),
        ("values", Values),
        ("sums", c_void_p),
        ("tiles", Tiles),
        ("quantizer", Quantizer),
    )


class DecompressAccumulateRecompress(ctypes.Structure):
    """Arguments of decompress_accumulate_recompress.cu."""

    _fields_ = (
        ("payload", c_void_p),
        ("values", Values),
        ("incoming", Tiles),
        ("outgoing", Tiles),
        ("quantizer", Quantizer),
        ("out", c_void_p),
    )


class Store(ctypes.Structure):
    """Arguments of store.cu."""

    _fields_ = (
        ("values", Values),
        ("units", c_void_p),
        ("result", Result),
    )


def _at(tensor: Tensor) -> int:
    return tensor.data_ptr()
