"""The GPU's code, run on the CPU: teams and shuffles give the reference's bits.

In FP32: how other entries are read is shared with the supergroups' kernels, whose test has them.
"""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq.kernels.hadamard import ops
from dynamiq.kernels.registry import ENTRY_DTYPES
from tests.kernels.emulating import emulator
from tests.kernels.hadamard import test_builds


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Return a function that returns what stands in for ``ops._build``, for an order of threads."""
    function = emulator(tmp_path_factory.mktemp("emulation"))

    def build(reverse):
        def of_entries(dtype, device):
            def run(kernel, arguments, count):
                emulate = function(kernel, ENTRY_DTYPES[dtype], reverse=reverse)
                emulate(ctypes.byref(arguments), 0, count)

            return run

        return of_entries

    return build


@settings(max_examples=30)
@given(call=test_builds.calls(dtypes=(torch.float32,), largest=12), reverse=st.booleans())
def test_the_gpus_code_gives_the_references_bits(emulated, call, reverse):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_build", emulated(reverse))
        test_builds.check_every_operation(call)


@pytest.mark.parametrize("log_block", [16, 17])
def test_all_threads_of_a_team_share_a_column(emulated, log_block):
    """256 points at a stride, and two passes of fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_build", emulated(reverse=False))
        test_builds.check_every_operation(test_builds.large_call(log_block))
