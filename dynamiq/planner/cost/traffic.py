"""What formats cost on a GPU on which nobody has measured them: the bytes that kernels move.

Codecs are bound by memory (DynamiQ §4; docs/results/kernels.md), so an entry costs its bytes over
the memory's bandwidth: for kernels those that ``dynamiq.roofline`` counts, for passes of torch
what they read and write. A time like this is the least; kernels reach most of it, not all.

What an operation costs however few entries it has is Python's and the launches': as measured on
one core of a Xeon with ``dynamiq probe``, where it is the same code.
"""

from collections.abc import Callable, Mapping

from dynamiq.compressors import DynamiQCompressor, MXCompressor, THCCompressor, Uncompressed
from dynamiq.core.compressor import Compressor
from dynamiq.planner.profiles.hardware import CodecCost, OperationCost
from dynamiq.roofline.case import Case
from dynamiq.roofline.families import traffic
from dynamiq.roofline.traffic import UNIT

_UNITS = 512
"""A whole tile, for the tables that go with tiles."""
_DENSE = 36.0
"""Bytes of an entry that loading into a padded float32 buffer and storing from it move: zeros
written (4), a copy (8), two scalings (16), a copy back (8)."""
_FLOAT = 4.0

Bytes = Mapping[str, float]
"""Operation → bytes of an entry."""

_FIXED_S = {
    "uncompressed": {"encode": 1.4e-4, "": 2e-5},
    "mx": {"encode": 1.5e-4, "": 4.5e-5},
    "thc": {"statistics": 2.3e-4, "encode": 6e-4, "statistics_message": 2e-5, "": 3e-5},
    "dynamiq": {
        "statistics": 2.0e-4,
        "statistics_message": 3e-5,
        "encode": 1.2e-3,
        "next_state": 7.5e-4,
        "": 1.2e-4,
    },
}


def estimate(compressor: Compressor, memory_bytes_per_s: float) -> CodecCost | None:
    """Return a format's costs by the bytes that it moves; None for formats that are not known here.

    Args:
        compressor: The format.
        memory_bytes_per_s: Of the GPU.
    """
    count = _COUNTED.get(type(compressor))
    if count is None:
        return None
    moved, fixed = count(compressor), _FIXED_S[compressor.kind]

    def cost(operation: str) -> OperationCost:
        entry_s = moved.get(operation, 0.0) / memory_bytes_per_s
        works = operation in moved or operation in fixed
        return OperationCost(fixed_s=fixed.get(operation, fixed[""]) * works, entry_s=entry_s)

    operations = [name for name in CodecCost.model_fields if name != "compressor"]
    return CodecCost(compressor=compressor, **{name: cost(name) for name in operations})


def _uncompressed(compressor: Compressor) -> Bytes:
    assert isinstance(compressor, Uncompressed)
    wire = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0}[compressor.format]
    widened = 2 * _FLOAT if wire < _FLOAT else 0.0  # written and read again
    added = wire + widened + 2 * _FLOAT
    return {
        "encode": _DENSE,
        "compress": _FLOAT + wire,
        "accumulate": added,
        "recompress": added + _FLOAT + wire,
        "decompress": wire + widened + _FLOAT,
    }


def _mx(compressor: Compressor) -> Bytes:
    assert isinstance(compressor, MXCompressor)
    kernel = {
        "compress": "mx_compress",
        "accumulate": "mx_decompress_accumulate",
        "recompress": "mx_decompress_accumulate_recompress",
        "decompress": "mx_decompress",
    }
    moved = {
        name: _moved(Case(found, "FP32", operands=compressor.format))
        for name, found in kernel.items()
    }
    return {"encode": _DENSE, **moved}


def _dynamiq(compressor: Compressor) -> Bytes:
    assert isinstance(compressor, DynamiQCompressor)
    kernel = {
        "compress": "compress",
        "accumulate": "decompress_accumulate",
        "recompress": "decompress_accumulate_recompress",
        "decompress": "decompress",
    }
    low = max((w for w in compressor.widths if w <= compressor.bit_budget), default=1)
    high = min((w for w in compressor.widths if w > low), default=low)
    share = (compressor.bit_budget - low) / (high - low) if high > low else 0.0

    def at(name: str, width: int) -> float:
        return _moved(Case(name, "FP32", width))

    moved = {
        name: at(found, low) + share * (at(found, high) - at(found, low))
        for name, found in kernel.items()
    }
    return {"statistics": _moved(Case("statistics", "FP32")), **moved}


def _thc(compressor: Compressor) -> Bytes:
    """Of 4 bits and sums that fit a byte; two passes over large blocks each way."""
    rotated = _moved(Case("rotate", "FP32")) + _moved(Case("mix", None, operands="to uint8"))
    back = _moved(Case("mix", None, operands="from uint8")) + _moved(Case("rotate_back", "FP32"))
    carried = {
        "compress": "pack 4 bits",
        "accumulate": "add 4 bits",
        "recompress": "5 to 6 bits",
        "decompress": "read 6 bits",
    }
    return {
        "statistics": _moved(Case("energies", "FP32")),
        "encode": rotated + back,
        **{name: _moved(Case("carry", None, operands=what)) for name, what in carried.items()},
    }


def _moved(case: Case) -> float:
    return traffic(case, _UNITS).moved_bytes / (_UNITS * UNIT)


_COUNTED: dict[type[Compressor], Callable[[Compressor], Bytes]] = {
    Uncompressed: _uncompressed,
    MXCompressor: _mx,
    DynamiQCompressor: _dynamiq,
    THCCompressor: _thc,
}
