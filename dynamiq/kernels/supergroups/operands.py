"""What the operations read and write besides payloads: buckets, partial sums, results."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.kernels.registry import ENTRY_DTYPES


@dataclass(frozen=True)
class Bucket:
    """A flat tensor in supergroups: unit u is supergroup u mod p of chunk u div p.

    Attributes:
        entries: float32, bfloat16 or float16[m], contiguous.
        slices: int64[n + 1]; chunk c holds entries slices[c] to slices[c + 1] of the flat tensor.
        positions: Supergroups p of a chunk.
        origin: Which entry of the flat tensor ``entries[0]`` is.
    """

    entries: Tensor
    slices: Tensor
    positions: int
    origin: int = 0


@dataclass(frozen=True)
class Values:
    """Partial sums in the order of tiles: ``sums``, or this rank's own entries where it is None.

    Own entries are brought into range while they are read: entry · factor − shift, then rotated
    where there are signs; what a supergroup has too little is zero before that.

    Attributes:
        bucket: This rank's own entries.
        factor: float32[n * p], a power of two for each supergroup of the bucket.
        shift: float32[n * p].
        sums: float32[t, s, 256], or None.
        signs: Key of a rotation's random signs; None for no rotation.
    """

    bucket: Bucket
    factor: Tensor
    shift: Tensor
    sums: Tensor | None = None
    signs: int | None = None


@dataclass(frozen=True)
class Result:
    """Where finished sums go: (sum / divisor + offset) / factor, limited, cast, in their places.

    Rotated sums are rotated back first.

    Attributes:
        bucket: What is written.
        factor: float32[n * p], as in :class:`Values`.
        offset: float32[n * p]; NaN makes the whole supergroup NaN.
        divisor: 1 for a sum, the number of ranks for a mean.
        limit: Largest magnitude; infinity for none.
        signs: As in :class:`Values`.
    """

    bucket: Bucket
    factor: Tensor
    offset: Tensor
    divisor: float
    limit: float
    signs: int | None = None


def is_direct(entries: Tensor) -> bool:
    """Return whether kernels can read and write these entries where they are."""
    lazy = entries.is_neg() or entries._is_zerotensor()  # memory that holds something else, or none
    return entries.dtype in ENTRY_DTYPES and entries.is_contiguous() and not lazy


def entries_of(x: Tensor) -> Tensor:
    """Return x[d] as kernels can read it: itself, or a contiguous copy, float32 if need be."""
    if is_direct(x):
        return x
    dtype = x.dtype if x.dtype in ENTRY_DTYPES else torch.float32
    return torch.empty(x.shape, dtype=dtype, device=x.device).copy_(x)
