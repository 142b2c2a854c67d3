"""Every build gives the reference's bits: any operation, block, dtype, width, tail and value."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.kernels.hadamard import ops
from dynamiq.kernels.hadamard.operands import Quantizer
from tests.kernels.hadamard.operations import TABLES, Call, everything
from tests.kernels.supergroups.test_builds import DTYPES, NAN, assert_same, canonical, entries


@st.composite
def calls(draw, dtypes=DTYPES, largest=14):
    """Return a call; blocks have at most 2^largest entries."""
    log_block = draw(st.integers(8, largest))
    numel = draw(st.integers(1, 3 << log_block))
    offset = draw(st.integers(0, 3))
    x = draw(entries(numel + offset, draw(st.sampled_from(dtypes))))[offset:]
    table = draw(st.sampled_from(TABLES))
    top = table[-1] if table else 2 ** draw(st.integers(1, 20)) - 1
    key = draw(st.integers(0, 2**64 - 1))
    ranks = draw(st.sampled_from([1, 2, 8, 17, 1024]))
    return Call.of(x, log_block, Quantizer(key, top, table), ranks, mean=draw(st.booleans()))


@given(calls())
def test_every_operation_gives_the_references_bits(call):
    check_every_operation(call)


@pytest.mark.parametrize("log_block", [16, 17, 21])
def test_large_blocks(log_block):
    """Two passes after the first from 2^17 on, three from 2^21 on."""
    check_every_operation(large_call(log_block))


def large_call(log_block):
    """Return a call on one block."""
    x = torch.randn((1 << log_block) - 3, generator=torch.Generator().manual_seed(0))
    return Call.of(x, log_block, Quantizer(1, 15), 8, mean=True)


def check_every_operation(call):
    """Compare what ``ops`` gives with the reference."""
    with pytest.MonkeyPatch.context() as patch:
        ours = list(everything(call))
        patch.setattr(ops, "_build", lambda *_: None)
        theirs = list(everything(call))
    for (_, actual), (_, expected) in zip(ours, theirs, strict=True):
        assert_same(actual, expected)
        if actual.is_floating_point() and actual.dtype != torch.float64:
            assert canonical(actual).tolist() in ([], [NAN[actual.dtype]])
