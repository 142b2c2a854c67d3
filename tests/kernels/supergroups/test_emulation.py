"""The GPU's code, run on the CPU: teams, shuffles and shared memory give the reference's bits.

What it cannot show are the instructions for which there is no C++ (FP16 conversions) and what a
real GPU's driver does; tests marked ``gpu`` do.
"""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.kernels.registry import ENTRY_DTYPES
from dynamiq.kernels.supergroups import ops
from tests.kernels.emulating import emulator
from tests.kernels.supergroups import test_builds


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Return a function that returns what runs kernels for a bucket, and a switch of the order."""
    function = emulator(tmp_path_factory.mktemp("emulation"))

    def build(reverse):
        def of_bucket(bucket):
            entry_format = ENTRY_DTYPES[bucket.entries.dtype]

            def run(kernel, arguments, count):
                function(kernel, entry_format, reverse=reverse)(ctypes.byref(arguments), 0, count)

            return run

        return of_bucket

    return build


@given(
    call=test_builds.calls(dtypes=(torch.float32, torch.bfloat16)),
    reverse=st.booleans(),
)
def test_the_gpus_code_gives_the_references_bits(emulated, call, reverse):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_build", emulated(reverse))
        test_builds.check_every_operation(call)
