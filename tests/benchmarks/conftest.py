"""What can be chosen about benchmarks; see test_kernels.py for the defaults."""

import pytest

CHOICES = {
    "entries": {"type": int, "help": "entries of every kernel benchmark, a multiple of 256"},
    "threads": {"type": int, "default": 1, "help": "threads of the host kernels (default 1)"},
    "rounding": {
        "choices": ["stochastic", "correlated", "nearest"],
        "action": "append",
        "help": "rounding of every kernel benchmark; may be repeated",
    },
    "device": {"default": "cpu", "help": "where kernels run: cpu (the default) or cuda"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernel benchmarks")
    for name, choice in CHOICES.items():
        group.addoption(f"--kernel-{name}", **choice)
