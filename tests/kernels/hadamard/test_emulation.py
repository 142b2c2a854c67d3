"""The GPU's code, run on the CPU: teams and shuffles give the reference's bits.

In FP32: how other entries are read is shared with the supergroups' kernels, whose test has them.
In one order of threads: they share nothing but by shuffles.
"""

import ctypes

import pytest
import torch
from hypothesis import given, settings

from dynamiq.kernels.hadamard import ops
from dynamiq.kernels.registry import ENTRY_DTYPES
from tests.kernels.emulating import emulator
from tests.kernels.hadamard import test_builds


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Return what stands in for ``ops._build``."""
    function = emulator(tmp_path_factory.mktemp("emulation"))

    def build(dtype, device):
        def run(kernel, arguments, count):
            emulate = function(kernel, dtype and ENTRY_DTYPES[dtype], reverse=True)
            emulate(ctypes.byref(arguments), 0, count)

        return run

    return build


@settings(max_examples=30)
@given(call=test_builds.calls(dtypes=(torch.float32,), largest=12))
def test_the_gpus_code_gives_the_references_bits(emulated, call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_build", emulated)
        test_builds.check_every_operation(call)


@pytest.mark.parametrize("log_block", [16, 17])
def test_all_threads_of_a_team_share_a_column(emulated, log_block):
    """256 points at a stride, and two passes of fewer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_build", emulated)
        test_builds.check_every_operation(test_builds.large_call(log_block))
