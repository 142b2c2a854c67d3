"""Numbers read from machine code: against the assembler's own report, and against small kernels."""

import io
import re
import sys

import pytest
from cuda.core import Program, ProgramOptions

from dynamiq.core.errors import KernelError
from dynamiq.kernels.cubin import read_resources
from dynamiq.kernels.registry import ARCHITECTURES
from dynamiq.kernels.sass import Instruction, Listing, disassemble

KERNELS = """
extern "C" __global__ void streaming(const float4* x, float4* y, long long n) {
    long long i = blockIdx.x * 128ll + threadIdx.x;
    if (i < n) y[i] = x[i];
}
extern "C" __global__ void sharing(const float* x, float* y) {
    __shared__ float all[128];
    __shared__ int few[3];
    all[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 3) few[threadIdx.x] = threadIdx.x;
    __syncthreads();
    y[threadIdx.x] = all[threadIdx.x ^ 1] + few[threadIdx.x % 3];
}
extern "C" __global__ void spilling(float* x, int n) {
    float v[64];
    for (int k = 0; k < 64; k++) v[k] = x[threadIdx.x + k * 128];
    for (int j = 0; j < n; j++)
        for (int k = 0; k < 64; k++) v[k] += v[(k + 7) & 63] * v[(k * 3) & 63];
    for (int k = 0; k < 64; k++) x[threadIdx.x + k * 128] = v[k];
}
extern "C" __global__ void indexing(float* x, int n) {
    float v[64];
    for (int k = 0; k < 64; k++) v[k] = x[threadIdx.x + k * 128];
    for (int k = 0; k < n; k++) v[(k * 17 + n) & 63] += v[(n * k) & 63];
    for (int k = 0; k < 64; k++) x[threadIdx.x + k * 128] = v[k];
}
extern "C" __global__ void one_byte(const unsigned char* x, unsigned char* y) { *y = *x; }
extern "C" __global__ void eight_bytes(const double* x, double* y) { *y = *x; }
extern "C" __global__ void nothing() {}
"""
NAMES = re.findall(r"__global__ void (\w+)", KERNELS)


SOME = ("sm_90a", "sm_120a")
ROWS = [
    pytest.param(row, marks=() if str(row) in SOME else pytest.mark.soak) for row in ARCHITECTURES
]


@pytest.fixture(scope="module", params=ROWS, ids=str)
def built(request):
    """The kernels' cubin, and what the assembler said: name → its numbers in their order."""
    log = io.StringIO()
    options = ProgramOptions(arch=str(request.param), max_register_count=32, ptxas_options=["-v"])
    cubin = bytes(Program(KERNELS, "c++", options=options).compile("cubin", logs=log).code)
    parts = re.split(r"Compiling entry function '(\w+)'", log.getvalue())[1:]
    return cubin, dict(zip(parts[::2], parts[1::2], strict=True))


def reported(text, pattern):
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


@pytest.mark.parametrize("name", NAMES)
def test_resources_are_those_that_the_assembler_reports(built, name):
    cubin, said = built
    resources = read_resources(cubin, name)

    assert resources.registers == reported(said[name], r"Used (\d+) registers")
    assert resources.local_bytes == reported(said[name], r"(\d+) bytes stack frame")
    assert resources.shared_bytes == reported(said[name], r"(\d+) bytes smem")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "indexing"])
def test_spills_are_those_that_the_assembler_reports(built, name):
    cubin, said = built
    listing = disassemble(cubin, name)

    assert listing.spill_stores_bytes == reported(said[name], r"(\d+) bytes spill stores")
    assert listing.spill_loads_bytes == reported(said[name], r"(\d+) bytes spill loads")


def test_the_test_kernels_do_what_they_are_for(built):
    cubin, _ = built
    assert read_resources(cubin, "sharing").shared_bytes == 128 * 4 + 3 * 4
    assert disassemble(cubin, "spilling").spill_stores_bytes > 0
    assert read_resources(cubin, "indexing").local_bytes == 256
    assert disassemble(cubin, "indexing").spill_stores_bytes > 0, "local arrays count, too"


def test_parameters(built):
    cubin, _ = built
    assert read_resources(cubin, "streaming").parameter_bytes == (8, 8, 8)
    assert read_resources(cubin, "spilling").parameter_bytes == (8, 4)
    assert read_resources(cubin, "nothing").parameter_bytes == ()


@pytest.mark.parametrize(
    ("name", "widest"),
    [("streaming", 16), ("eight_bytes", 8), ("sharing", 4), ("one_byte", 1), ("nothing", 0)],
)
def test_the_widest_load(built, name, widest):
    assert disassemble(built[0], name).widest_load_bytes == widest


def test_padding_is_not_counted(built):
    """Behind the last instruction is a branch to itself, and no-ops up to a round address."""
    mnemonics = [i.mnemonic for i in disassemble(built[0], "nothing").instructions]
    assert mnemonics[-1] == "EXIT"
    assert len(mnemonics) <= 2


def test_classes_of_a_small_kernel(built):
    counts = disassemble(built[0], "streaming").count_by_class()

    assert counts["branch"] == 2, "two exits: early, and at the end"
    assert counts["memory"] >= 2
    assert counts["integer"] > 0
    assert not {"shuffle", "conversion"} & set(counts)


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("LDG.E.128", "memory"),
        ("LDCU.64", "memory"),
        ("ULDC", "memory"),
        ("FADD", "float"),
        ("UFADD", "float"),
        ("HFMA2.MMA", "float"),
        ("F2I.NTZ", "conversion"),
        ("IMAD.WIDE.U32", "integer"),
        ("UISETP.GE.AND", "integer"),
        ("SHFL.BFLY", "shuffle"),
        ("BAR.SYNC.DEFER_BLOCKING", "branch"),
        ("UMOV", "other"),
        ("S2R", "other"),
    ],
)
def test_classes(opcode, kind):
    assert Instruction(opcode).kind == kind


@pytest.mark.parametrize(
    ("opcode", "nbytes"),
    [
        ("LDG.E", 4),
        ("LDG.E.U8.CONSTANT", 1),
        ("LDG.E.S16", 2),
        ("STL.64", 8),
        ("STG.E.128", 16),
        ("LDG.E.ENL2.256", 32),
    ],
)
def test_sizes_of_accesses(opcode, nbytes):
    assert Instruction(opcode).access_bytes == nbytes


def test_instructions_per_entry():
    assert Listing((Instruction("FADD"),) * 24).per_entry == 1.5


@pytest.mark.parametrize(
    "damaged", [b"", b"\x7fELF\x02", b"x" * 4096], ids=["empty", "short", "other"]
)
def test_what_is_no_cubin_is_refused(damaged):
    with pytest.raises(KernelError, match=f"from {len(damaged)} bytes"):
        read_resources(damaged, "streaming")
    with pytest.raises(KernelError, match="nvdisasm cannot read the cubin of streaming: nvdisasm"):
        disassemble(damaged, "streaming")


def test_truncated_cubins_are_refused(built):
    cubin, _ = built
    for size in range(0, len(cubin) - 1, 997):
        with pytest.raises(KernelError, match=f"from {size} bytes"):
            read_resources(cubin[:size], "streaming")


def test_another_kernel_is_refused(built):
    with pytest.raises(KernelError, match="no kernel absent can be read"):
        read_resources(built[0], "absent")
    with pytest.raises(KernelError, match=r"no kernel absent; it has .*streaming"):
        disassemble(built[0], "absent")


def test_without_nvdisasm_the_error_names_the_extra(built, monkeypatch):
    monkeypatch.setattr("cuda.pathfinder.find_nvidia_binary_utility", lambda name: None)
    with pytest.raises(KernelError, match=r'nvdisasm.*pip install "dynamiq-allreduce\[gpu\]"'):
        disassemble(built[0], "streaming")


def test_without_the_extra_the_error_names_it(built, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    with pytest.raises(KernelError, match=r'pip install "dynamiq-allreduce\[gpu\]"'):
        disassemble(built[0], "streaming")
