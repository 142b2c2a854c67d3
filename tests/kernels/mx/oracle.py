"""The MX formats once more: ml_dtypes' casts, float64 for scales, NumPy's bits for the layout.

Nothing of :mod:`dynamiq.kernels.mx` but the names of the formats is used.
"""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

DTYPES = {
    "mxfp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "mxfp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "mxfp6_e3m2": np.dtype(ml_dtypes.float6_e3m2fn),
    "mxfp6_e2m3": np.dtype(ml_dtypes.float6_e2m3fn),
    "mxfp4_e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
}
BITS = {name: int(name[4]) for name in DTYPES}


def largest(name: str) -> float:
    return float(ml_dtypes.finfo(DTYPES[name]).max)


def values(name: str) -> np.ndarray:
    """Return what all codes stand for, float32[2^bits]."""
    return np.arange(2 ** BITS[name], dtype=np.uint8).view(DTYPES[name]).astype(np.float32)


def magnitudes(name: str) -> np.ndarray:
    """Return all finite magnitudes, ascending, as float64."""
    found = values(name)[: 2 ** (BITS[name] - 1)].astype(np.float64)
    return found[np.isfinite(found)]


def codes(name: str, y: np.ndarray) -> np.ndarray:
    """Return the codes uint8[...] of float32[...], rounded to nearest, saturating."""
    return np.clip(y, -largest(name), largest(name)).astype(DTYPES[name]).view(np.uint8)


def scale_byte(name: str, top: float, rule: str) -> int:
    """Return the scale of a block whose largest magnitude is ``top`` (finite)."""
    if top == 0:
        return 0
    emax = int(np.floor(np.log2(largest(name))))
    mantissa, exponent = np.frexp(top)
    e = int(exponent) - 1 - emax
    if rule == "ceil" and float(mantissa) * 2.0 > largest(name) / 2.0**emax:
        e += 1
    return int(np.clip(e + 127, 0, 254 - emax))


@dataclass(frozen=True)
class Payload:
    """A payload, read: codes uint8[blocks, 32] and scales uint8[blocks]."""

    codes: np.ndarray
    scales: np.ndarray

    def decoded(self, name: str) -> np.ndarray:
        """Return float64[blocks, 32]."""
        with np.errstate(invalid="ignore"):
            x = values(name)[self.codes] * 2.0 ** (self.scales.astype(np.float64) - 127)[:, None]
        return np.where((self.scales == 255)[:, None], np.nan, x)


def encoded(name: str, x: np.ndarray, rule: str = "floor") -> Payload:
    """Return the payload of float32[blocks, 32], rounded to nearest."""
    finite = np.isfinite(x).all(1)
    x = np.where(finite[:, None], x, 0.0)
    scales = np.array([scale_byte(name, top, rule) for top in np.abs(x).max(1).astype(float)])
    y = x.astype(np.float64) * 2.0 ** (127.0 - scales)[:, None]
    scales = np.where(finite, scales, 255).astype(np.uint8)
    return Payload(codes(name, y.astype(np.float32)), scales)


def read(name: str, data: np.ndarray) -> Payload:
    """Read the bytes: codes, least significant bit first, then scales."""
    blocks = len(data) // (4 * BITS[name] + 1)
    bits = np.unpackbits(data[: blocks * 4 * BITS[name]], bitorder="little")
    weights = 2 ** np.arange(BITS[name], dtype=np.uint8)
    found = (bits.reshape(blocks, 32, BITS[name]) * weights).sum(2).astype(np.uint8)
    return Payload(found, data[blocks * 4 * BITS[name] :])
