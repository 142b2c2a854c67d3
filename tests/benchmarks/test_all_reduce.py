"""What an all-reduce of one rank costs besides the wire, beside a copy of the same entries.

    scripts/test tests/benchmarks

Four ranks in one thread over a butterfly; divide by four for one rank.
"""

import pytest
import torch

from dynamiq import Butterfly, DynamiQCompressor, Uncompressed, measure_error

RANKS, ENTRIES = 4, 1 << 20
GRADIENTS = torch.randn(RANKS, ENTRIES, generator=torch.Generator().manual_seed(0))
COMPRESSORS = {
    "fp32": Uncompressed("fp32"),
    "bf16": Uncompressed("bf16"),
    "dynamiq-stochastic": DynamiQCompressor.paper(5, rounding="stochastic"),
    "dynamiq-correlated": DynamiQCompressor.paper(5, rounding="correlated"),
}


def test_copy(benchmark) -> None:
    benchmark(GRADIENTS.clone)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_all_reduce(benchmark, name: str) -> None:
    benchmark.extra_info["entries"] = RANKS * ENTRIES
    benchmark(measure_error, GRADIENTS, COMPRESSORS[name], Butterfly())
