"""A GPU gives the host's bits: every operation, block size, dtype, width, tail and value."""

import pytest
import torch
from hypothesis import given

from dynamiq.kernels.hadamard.operands import Quantizer
from dynamiq.kernels.registry import kernels_of
from tests.kernels.devices import on
from tests.kernels.hadamard.operations import TABLES, Call, everything
from tests.kernels.hadamard.test_builds import calls
from tests.kernels.supergroups.test_builds import DTYPES, bits


def small_call(dtype: torch.dtype, table: tuple[int, ...] | None) -> Call:
    """Return a call with a tail and several passes."""
    x = torch.randn(70_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    top = table[-1] if table else 15
    return Call.of(x[1:], 13, Quantizer(3, top, table), 8, mean=True)


def assert_the_same_bits(call: Call) -> None:
    ours = everything(on("cuda", call))
    for (name, actual), (_, expected) in zip(ours, everything(call), strict=True):
        assert torch.equal(bits(actual.cpu()), bits(expected)), name


def test_no_kernel_is_forgotten():
    names = {name for name, _ in everything(small_call(torch.float32, None))}
    assert names | {"rotate"} == {spec.name for spec in kernels_of("hadamard")}


@pytest.mark.gpu
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_call(dtype, table):
    """Few and short launches: what compute-sanitizer can watch."""
    assert_the_same_bits(small_call(dtype, table))


@pytest.mark.gpu
@given(calls())
def test_any_call(call):
    assert_the_same_bits(call)
