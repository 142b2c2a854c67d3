"""Golden payloads of OmniReduce, see :mod:`tests.compressors.golden`."""

import torch

from dynamiq import Butterfly, Direct, OmniReduceCompressor, Ring
from dynamiq.core.message import Call
from tests.compressors.golden import Case, Goldens, from_hex

WITH_ZEROS = (1.0, 0.0, 2.0**-9, 0.0, 0.0, 2.0**-3)

CASES = {
    "lossless": Case(OmniReduceCompressor(), Ring(), 3, 1300, Call(1, 7, 3), scales=WITH_ZEROS),
    "topk-with-bounds": Case(
        OmniReduceCompressor(mode="topk", payload="fp32", bit_budget=12),
        Butterfly(),
        4,
        2100,
        Call(2**40, 0),
        bounds=(0, 300, 300, 1100, 2100),
    ),
    "topk": Case(
        OmniReduceCompressor(mode="topk", bit_budget=5), Direct(), 3, 4000, Call(-5, 2**31, 3)
    ),
}


def share_of(outcome):
    """Return the votes' share after the call."""
    shared = outcome.states[0].shared
    return shared["share"].item() if shared else None


GOLDENS = Goldens("omnireduce", CASES, {"share": share_of})


def test_the_cases_are_worth_keeping():
    """Some blocks are sent and some are not, and what is sent is near the exact sums."""
    for name, case in CASES.items():
        result = from_hex(GOLDENS.load(name)["result"], torch.float32)
        exact = case.exact()
        sent = result != 0
        assert 0 < sent.count_nonzero() < case.numel
        error = (result.double() - exact)[sent].square().sum()
        assert error / exact[sent].square().sum() < 1e-4


if __name__ == "__main__":
    GOLDENS.write_missing()
