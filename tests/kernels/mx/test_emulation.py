"""The GPU's code, run on the CPU: what holds where a GPU has no instruction for a conversion."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq.kernels.mx import ops
from tests.kernels.emulating import emulator
from tests.kernels.mx import operations
from tests.kernels.mx.test_builds import check_every_operation


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Return a function that returns what runs kernels, in one of two orders."""
    function = emulator(tmp_path_factory.mktemp("emulation"))

    def build(reverse):
        def run(kernel, arguments, count):
            function(kernel, "FP32", reverse=reverse)(ctypes.byref(arguments), 0, count)

        return run

    return build


@settings(max_examples=30)
@given(call=operations.calls(), reverse=st.booleans())
def test_the_gpus_code_gives_the_references_bits(emulated, call, reverse):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_build", lambda values: emulated(reverse))
        check_every_operation(call)
