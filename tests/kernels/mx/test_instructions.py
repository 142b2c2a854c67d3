"""Which GPUs convert by an instruction of their own; a GPU's tests check what it gives."""

import pytest

from dynamiq.kernels.architecture import Target
from dynamiq.kernels.nvrtc import compile_kernel
from dynamiq.kernels.registry import ARCHITECTURES, find_kernel
from dynamiq.kernels.sass import disassemble

FP8 = {"E4M3", "E5M2"}
ALL = FP8 | {"E3M2", "E2M3", "E2M1"}
EXPECTED = {
    "sm_80": set(),
    "sm_86": set(),
    "sm_89": FP8,
    "sm_90a": FP8,
    "sm_100a": ALL,
    "sm_103a": ALL,
    "sm_120a": ALL,
}
DEFAULT = ("sm_86", "sm_90a", "sm_120a")


def elements(kernel, architecture, after):
    """Return the elements that a kernel's instructions name behind a modifier."""
    compiled = compile_kernel(find_kernel(kernel), "FP32", Target(architecture))
    opcodes = [i.opcode.split(".") for i in disassemble(compiled.code, kernel).instructions]
    return {word for parts in opcodes if after in parts for word in parts if word in ALL}


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(a, id=str(a), marks=[] if str(a) in DEFAULT else [pytest.mark.soak])
        for a in ARCHITECTURES
    ],
)
def test_conversions_are_instructions_where_there_are_any(architecture):
    expected = EXPECTED[str(architecture)]
    assert elements("mx_compress", architecture, "SATFINITE") == expected
    assert elements("mx_decompress", architecture, "UNPACK_B") == expected


def test_every_architecture_is_expected_to_have_some_or_none():
    assert set(EXPECTED) == set(map(str, ARCHITECTURES))
