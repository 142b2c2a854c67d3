"""Golden payloads of the MX formats, see :mod:`tests.compressors.golden`."""

import torch

from dynamiq import Butterfly, MXCompressor, Ring
from dynamiq.core.message import Call
from tests.compressors.golden import EXTREME, Case, Goldens, from_hex

CASES = {
    "fp8-e4m3": Case(MXCompressor(), Ring(), 3, 700, Call(1, 7, 3)),
    "fp8-e5m2": Case(
        MXCompressor("mxfp8_e5m2", scale_rule="ceil", rounding="stochastic"),
        Butterfly(),
        4,
        700,
        Call(2**40, 0),
    ),
    "fp6-e3m2": Case(
        MXCompressor("mxfp6_e3m2", rounding="prescaled"),
        Ring(),
        3,
        700,
        Call(-5, 2**31),
        bounds=(0, 300, 300, 700),
    ),
    "fp6-e2m3": Case(
        MXCompressor("mxfp6_e2m3", scale_rule="ceil", scale_scope="shared"),
        Butterfly(),
        5,
        700,
        Call(3, 6, 5),
    ),
    "fp4-e2m1": Case(MXCompressor("mxfp4_e2m1", rounding="prescaled"), Ring(), 2, 700, Call(3, 6)),
    "extreme-values": Case(MXCompressor(), Butterfly(), 2, 1536, Call(0, 1, 2), scales=EXTREME),
}


GOLDENS = Goldens("mx", CASES, {})


def test_the_cases_are_worth_keeping():
    """Results are near the exact sums; NaN stays in its blocks of 32."""
    for name, case in CASES.items():
        result = from_hex(GOLDENS.load(name)["result"], torch.float32)
        exact = case.exact()
        finite = exact.isfinite() & result.isfinite()
        error = (result.double() - exact)[finite].square().sum()
        assert 0 < error / exact[finite].square().sum() < 0.1
        if name == "extreme-values":
            assert torch.equal(result.isnan(), exact.isnan())
            assert result.isfinite().sum() == 5 * 256
            assert (result[2 * 256 : 3 * 256] == 0).all()


if __name__ == "__main__":
    GOLDENS.write_missing()
