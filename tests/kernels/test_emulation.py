"""The GPU's code, run on the CPU: teams, shuffles and shared memory give the reference's bits.

What it cannot show are the instructions for which there is no C++ (FP16 conversions) and what a
real GPU's driver does; tests marked ``gpu`` do.
"""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.kernels import host, ops
from dynamiq.kernels.operands import ENTRY_FORMATS
from tests.kernels import test_builds

EMULATOR = Path(__file__).parent / "emulation" / "emulate.cpp"


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """Return a function that returns what runs kernels for a bucket, and a switch of the order."""
    folder = tmp_path_factory.mktemp("emulation")

    @cache
    def function(kernel, entry_format, reverse):
        path = folder / f"{kernel}-{entry_format}-{reverse}.so"
        flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
        defines = [f"-DNAME={kernel}", f'-DKERNEL_FILE="{kernel}.cu"', f"-DENTRY_{entry_format}"]
        order, folders = f"-DREVERSED={int(reverse)}", [f"-I{host.SOURCE}", "-o", path]
        command = [*host.find_compiler(), *flags, *defines, order, *folders, EMULATOR]
        subprocess.run(command, check=True)
        emulate = ctypes.CDLL(str(path)).emulate
        emulate.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        return emulate

    def build(reverse):
        def of_bucket(bucket):
            entry_format = ENTRY_FORMATS[bucket.entries.dtype]

            def run(kernel, arguments, count):
                function(kernel, entry_format, reverse)(ctypes.byref(arguments), 0, count)

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
