"""What an all-reduce of one rank costs besides the wire, beside a copy of the same entries.

    scripts/test tests/benchmarks

Four ranks in one thread over a butterfly; divide by four for one rank.
"""

import pytest
import torch

from dynamiq import (
    Butterfly,
    DynamiQCompressor,
    MXCompressor,
    OmniReduceCompressor,
    THCCompressor,
    Uncompressed,
    measure_error,
)

RANKS, ENTRIES = 4, 1 << 20
GRADIENTS = torch.randn(RANKS, ENTRIES, generator=torch.Generator().manual_seed(0))
COMPRESSORS = {
    "fp32": Uncompressed("fp32"),
    "bf16": Uncompressed("bf16"),
    "dynamiq-stochastic": DynamiQCompressor.paper(5, rounding="stochastic"),
    "dynamiq-correlated": DynamiQCompressor.paper(5, rounding="correlated"),
    "dynamiq": DynamiQCompressor(bit_budget=4),
    "dynamiq-local": DynamiQCompressor.local(4),
    "mxfp8": MXCompressor("mxfp8_e4m3"),
    "mxfp6": MXCompressor("mxfp6_e3m2"),
    "mxfp4": MXCompressor("mxfp4_e2m1"),
    "thc": THCCompressor.uniform(),
    "thc-table": THCCompressor.table(),
    "omnireduce": OmniReduceCompressor(),
    "omnireduce-topk": OmniReduceCompressor(mode="topk", bit_budget=5),
}


def test_copy(benchmark) -> None:
    benchmark(GRADIENTS.clone)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_all_reduce(benchmark, name: str) -> None:
    benchmark.extra_info["entries"] = RANKS * ENTRIES
    benchmark(measure_error, GRADIENTS, COMPRESSORS[name], Butterfly())
