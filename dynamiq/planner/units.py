"""Numbers with units, as people write them: read, refused in one line, and written again.

Bits and bytes cannot be mistaken for each other: bits are written out ("25Gbit/s"), bytes are
"B" ("3.1GB/s"), and what could be either, such as "Gb/s" or "Gbps", is refused. Prefixes are
decimal, those of memory sizes ("MiB") binary.
"""

import math
import re

from dynamiq.core.errors import InputError

_NUMBER = re.compile(
    r"\s*([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|nan|inf(?:inity)?))\s*(.*?)\s*",
    re.IGNORECASE,
)
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

_RATES = {
    **{f"{p}bit/s": x / 8 for p, x in _DECIMAL.items()},
    **{f"{p}B/s": x for p, x in {**_DECIMAL, **_BINARY}.items()},
}
_SIZES = {f"{p}B": x for p, x in {**_DECIMAL, **_BINARY}.items()}
_TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SHARES = {"": 1.0, "%": 1e-2}
_EITHER = re.compile(r"(?P<prefix>[kMGT]?)(bps|b/s|Bps|BPS)\s*$")


def bandwidth(text: str) -> float:
    """Return bytes per second.

    >>> bandwidth("25Gbit/s")
    3125000000.0

    Raises:
        InputError: No positive number with a unit, or one of which it is not clear whether it
            counts bits or bytes.
    """
    either = _EITHER.search(text)
    if either is not None:
        number, prefix = text[: either.start()].strip(), either["prefix"]
        raise InputError(
            f"{text!r} may mean bits or bytes; write {number}{prefix}bit/s, or {number}{prefix}B/s"
        )
    return _positive(text, _RATES, "a bandwidth", "25Gbit/s or 3.1GB/s")


def duration(text: str) -> float:
    """Return seconds.

    >>> duration("250ms")
    0.25

    Raises:
        InputError: No positive number with a unit.
    """
    return _positive(text, _TIMES, "a time", "30us, 250ms or 1.5s")


def latency(text: str) -> float:
    """Return seconds; 0 is possible.

    Raises:
        InputError: A negative number, none, or one without a unit.
    """
    return _scaled(text, _TIMES, "a latency", "30us")


def count(text: str) -> int:
    """Return a number of things, such as parameters.

    >>> count("1.2B")
    1200000000

    Raises:
        InputError: No positive number, or less than one.
    """
    number = round(_positive(text, _COUNTS, "a number", "350M, 1.2B or 5898240"))
    if number < 1:
        raise InputError(f"a number must be at least 1, got {text!r}")
    return number


def size(text: str) -> int:
    """Return bytes.

    >>> size("64MiB")
    67108864

    Raises:
        InputError: No positive number with a unit.
    """
    return round(_positive(text, _SIZES, "a size", "64MiB"))


def share(text: str) -> float:
    """Return a share: "5%" or "0.05".

    Raises:
        InputError: No number from 0 to 1.
    """
    value = _scaled(text, _SHARES, "a share", "5% or 0.05")
    if value > 1:
        raise InputError(f"a share is at most 100%, got {text!r}")
    return value


def error(text: str) -> float:
    """Return a relative error, such as a vNMSE.

    Raises:
        InputError: No positive number.
    """
    return _positive(text, _SHARES, "an error", "0.005 or 0.5%")


def show_time(seconds: float) -> str:
    """Return a time in three digits.

    >>> show_time(0.25)
    '250 ms'
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{_digits(seconds / scale)} {unit}"
    return f"{_digits(seconds / 1e-9)} ns" if seconds else "0 s"


def show_bandwidth(bytes_per_s: float) -> str:
    """Return a bandwidth in bits.

    >>> show_bandwidth(3.125e9)
    '25.0 Gbit/s'
    """
    return _prefixed(bytes_per_s * 8, "bit/s")


def show_size(nbytes: float) -> str:
    """Return bytes with a decimal prefix.

    >>> show_size(5_501_000)
    '5.50 MB'
    """
    return _prefixed(nbytes, "B")


def _prefixed(value: float, unit: str) -> str:
    for prefix, scale in reversed(_DECIMAL.items()):
        if value >= scale:
            return f"{_digits(value / scale)} {prefix}{unit}"
    return f"{value:g} {unit}"


def _digits(value: float) -> str:
    """Return three digits without an exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _positive(text: str, units: dict[str, float], what: str, example: str) -> float:
    value = _scaled(text, units, what, example)
    if not value:
        raise InputError(f"{what} must be greater than 0, got {text!r}")
    return value


def _scaled(text: str, units: dict[str, float], what: str, example: str) -> float:
    number, unit = _split(text, what, example)
    if not math.isfinite(number):
        raise InputError(f"{what} must be a finite number, got {text!r}")
    if number < 0:
        raise InputError(f"{what} cannot be negative, got {text!r}")
    if unit not in units:
        known = ", ".join(name for name in units if name)
        missing = "has no unit" if not unit else f"has the unknown unit {unit!r}"
        raise InputError(f"{what}, {text!r}, {missing}; units are {known}, as in {example}")
    return number * units[unit]


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise InputError(f"{what} is a number such as {example}, got {text!r}")
    return float(found[1]), found[2]
