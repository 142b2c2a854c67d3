"""What can be chosen about benchmarks; see test_kernels.py for the defaults."""

import pytest

CHOICES = {
    "entries": {"type": int, "help": "entries of every kernel benchmark, a multiple of 65536"},
    "threads": {"type": int, "default": 1, "help": "threads of the host kernels (default 1)"},
    "rounding": {
        "choices": ["stochastic", "correlated", "nearest", "prescaled"],
        "action": "append",
        "help": "rounding of all kernels that know it; may be repeated",
    },
    "device": {"default": "cpu", "help": "where kernels run: cpu (the default) or cuda"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel benchmarks")
    for name, choice in CHOICES.items():
        group.addoption(f"--kernel-{name}", **choice)
