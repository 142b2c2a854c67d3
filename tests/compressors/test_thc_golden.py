"""Golden payloads of THC, see :mod:`tests.compressors.golden`."""

import torch

from dynamiq import Butterfly, Ring, THCCompressor
from dynamiq.core.message import Call
from tests.compressors.golden import Case, Goldens, from_hex

SIZES = (2.0**100, 1.0, 0.0, 2.0**-130)

CASES = {
    "uniform": Case(THCCompressor.uniform(), Ring(), 3, 1300, Call(1, 7, 3)),
    "table": Case(THCCompressor.table(), Butterfly(), 5, 1000, Call(2**40, 0)),
    "wide-with-bounds": Case(
        THCCompressor.uniform(9, clamp=3.2972),
        Ring(),
        3,
        1300,
        Call(-5, 2**31, 3),
        bounds=(0, 300, 300, 1300),
    ),
    "extreme-values": Case(THCCompressor.uniform(5), Ring(), 2, 1024, Call(0, 1, 2), scales=SIZES),
}


GOLDENS = Goldens("thc", CASES, {})


def test_the_cases_are_worth_keeping():
    """Results are near the exact sums."""
    for name, case in CASES.items():
        exact = case.exact()
        error = from_hex(GOLDENS.load(name)["result"], torch.float32).double() - exact
        assert 0 < error.square().sum() / exact.square().sum() < 0.05


if __name__ == "__main__":
    GOLDENS.write_missing()
