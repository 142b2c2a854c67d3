"""The kernels' arguments as they lie in memory: the same bytes for every build.

Mirrors the structures of ``source/mx/*.cuh`` and ``source/mx/*.cu``, field by field. A structure
holds addresses only; whoever makes it keeps the tensors alive until the kernel has run.
"""

import ctypes
from ctypes import c_int32, c_int64, c_uint64, c_void_p

from torch import Tensor

from dynamiq.kernels.mx import reference, wire

_ROUNDINGS = {"nearest": 0, "stochastic": 1, "prescaled": 2}
_INFINITY, _NAN = 0x7F800000, 0x7FC00000


class Quantizer(ctypes.Structure):
    """``Quantizer`` of element.cuh."""

    _fields_ = tuple(
        (name, c_int32)
        for name in (
            *("element", "bits", "mantissa_bits", "least", "largest", "top", "after_top"),
            *("emax", "carry", "rounding"),
        )
    )

    @classmethod
    def of(cls, quantizer: wire.Quantizer) -> "Quantizer":
        """Return a quantiser in numbers."""
        e = quantizer.element
        return cls(
            *(e.index, e.bits, e.mantissa_bits, reference.least_bits(e)),
            *(reference.largest_bits(e), e.top, _INFINITY if e.has_infinity else _NAN, e.emax),
            *(reference.carry_of(quantizer), _ROUNDINGS[quantizer.rounding]),
        )


class Segment(ctypes.Structure):
    """``Segment`` of blocks.cuh."""

    _fields_ = (
        ("values", c_void_p),
        ("blocks", c_int64),
        ("first", c_int64),
        ("key", c_uint64),
        ("scales", c_void_p),
    )

    @classmethod
    def of(cls, segment: wire.Segment, values: Tensor) -> "Segment":
        """Return the addresses of a segment."""
        scales = None if segment.scales is None else segment.scales.data_ptr()
        return cls(values.data_ptr(), segment.blocks, segment.first, segment.key, scales)


class MxCompress(ctypes.Structure):
    """Arguments of mx_compress.cu."""

    _fields_ = (("segment", Segment), ("quantizer", Quantizer), ("payload", c_void_p))


class MxDecompress(ctypes.Structure):
    """Arguments of mx_decompress.cu."""

    _fields_ = (("payload", c_void_p), ("segment", Segment), ("quantizer", Quantizer))


class MxDecompressAccumulate(ctypes.Structure):
    """Arguments of mx_decompress_accumulate.cu."""

    _fields_ = MxDecompress._fields_


class MxDecompressAccumulateRecompress(ctypes.Structure):
    """Arguments of mx_decompress_accumulate_recompress.cu."""

    _fields_ = (
        ("payload", c_void_p),
        ("incoming", Segment),
        ("outgoing", Segment),
        ("quantizer", Quantizer),
        ("out", c_void_p),
    )
