"""Golden payloads of DynamiQ, see :mod:`tests.compressors.golden`."""

import torch

from dynamiq import Butterfly, DynamiQCompressor, Ring
from dynamiq.core.message import Call
from tests.compressors.golden import EXTREME, Case, Goldens, from_hex

CASES = {
    "paper": Case(DynamiQCompressor.paper(), Ring(), 3, 1300, Call(1, 7, 3)),
    "every-width": Case(
        DynamiQCompressor.paper(
            6.0,
            widths=(1, 2, 4, 8, 16),
            rounding="stochastic",
            energy="raw",
            group_scales="up",
            epsilon_4=0.23,
        ),
        Butterfly(),
        4,
        1536,
        Call(2**40, 0),
    ),
    "nearest-with-bounds": Case(
        DynamiQCompressor.paper(5.5, rounding="nearest"),
        Ring(),
        3,
        1300,
        Call(-5, 2**31),
        bounds=(0, 300, 300, 1300),
    ),
    "rotated": Case(DynamiQCompressor.rotated(4.0), Ring(), 3, 4000, Call(3, 5, 3)),
    "local": Case(DynamiQCompressor.local(4.0), Butterfly(), 5, 6000, Call(3, 6)),
    "extreme-values": Case(
        DynamiQCompressor.paper(4.0), Butterfly(), 2, 1536, Call(0, 1, 2), scales=EXTREME
    ),
}


GOLDENS = Goldens("dynamiq", CASES, {})


def test_the_cases_are_worth_keeping():
    """All widths occur, zeros and NaN too, and results are near the exact sums."""
    results = {
        name: from_hex(GOLDENS.load(name)["result"], torch.float32) for name, case in CASES.items()
    }
    for name, case in CASES.items():
        exact = case.exact()
        finite = exact.isfinite() & results[name].isfinite()
        error = (results[name].double() - exact)[finite].square().sum()
        assert 0 < error / exact[finite].square().sum() < 0.1
    extreme = results["extreme-values"]
    assert extreme[4 * 256 : 5 * 256].isnan().all()
    assert extreme.isfinite().sum() == 5 * 256
    assert (extreme[2 * 256 : 3 * 256] == 0).all()


if __name__ == "__main__":
    GOLDENS.write_missing()
