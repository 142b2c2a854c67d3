"""Compiling without a GPU: the flags, the cache, the errors, and every kernel of the project."""

import ctypes
import logging
import sys
from importlib import import_module

import pytest

from dynamiq.core.errors import KernelError
from dynamiq.kernels import nvrtc
from dynamiq.kernels.architecture import Target
from dynamiq.kernels.nvrtc import compile_kernel, known_architectures
from dynamiq.kernels.registry import (
    ARCHITECTURES,
    ENTRY_FORMATS,
    KERNELS,
    find_architecture,
    find_kernel,
)
from dynamiq.kernels.sass import disassemble
from tests.kernels.compiling import HEADER, HOPPER, SOURCE, write_kernel

NEWEST = sorted(ARCHITECTURES)[-2:]
OTHERS = sorted(ARCHITECTURES)[:-2]  # compiled by the soak tests
BUILDS = [
    # Entries are read with the supergroups' code, whose builds have all formats.
    pytest.param(
        name,
        entry_format,
        marks=[pytest.mark.soak] if spec.family == "hadamard" and entry_format != "FP32" else [],
    )
    for name, spec in KERNELS.items()
    for entry_format in spec.entry_formats or (None,)
]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    nvrtc._warn_once.cache_clear()
    monkeypatch.setenv("DYNAMIQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch):
    """The names of the kernels for which the compiler ran."""
    ran, original = [], nvrtc._compile

    def counted(spec, *rest):
        ran.append(spec.name)
        return original(spec, *rest)

    monkeypatch.setattr(nvrtc, "_compile", counted)
    return ran


def entries(cache):
    return [path for path in (cache / "nvrtc" / "entries").rglob("*") if path.is_file()]


def test_a_cubin_and_what_it_occupies(cache, tmp_path):
    compiled = compile_kernel(write_kernel(tmp_path / "source"), "FP32", HOPPER)

    assert (compiled.name, compiled.target) == ("sample", HOPPER)
    assert compiled.resources.parameter_bytes == (24, 8, 8)
    assert 0 < compiled.resources.registers < 64


def test_multiplications_and_additions_are_not_contracted(cache, tmp_path):
    compiled = compile_kernel(write_kernel(tmp_path / "source"), "FP32", HOPPER)

    mnemonics = {i.mnemonic for i in disassemble(compiled.code, "sample").instructions}
    assert {"FMUL", "FADD"} <= mnemonics
    assert "FFMA" not in mnemonics


@pytest.mark.parametrize("entry_format", ENTRY_FORMATS)
@pytest.mark.parametrize("width", [None, 4])
def test_format_and_width_arrive_as_macros(cache, tmp_path, entry_format, width):
    others = " || ".join(f"defined ENTRY_{f}" for f in ENTRY_FORMATS if f != entry_format)
    wanted = f"ONLY_WIDTH != {width}" if width else "defined ONLY_WIDTH"
    refusal = f"#if !defined ENTRY_{entry_format} || {others} || {wanted}\n#error\n#endif\n"
    spec = write_kernel(tmp_path / "source", refusal + SOURCE)

    compile_kernel(spec, entry_format, HOPPER, only_width=width)


def test_a_second_time_nothing_is_compiled(cache, tmp_path, compilations):
    spec = write_kernel(tmp_path / "source")

    assert compile_kernel(spec, "FP32", HOPPER) == compile_kernel(spec, "FP32", HOPPER)
    assert compilations == ["sample"]
    assert len(entries(cache)) == 1


@pytest.mark.parametrize("what", ["source", "header", "format", "width", "architecture"])
def test_whatever_changes_the_result_is_compiled_anew(cache, tmp_path, compilations, what):
    spec = write_kernel(tmp_path / "source")
    compile_kernel(spec, "FP32", HOPPER)
    if what == "source":
        write_kernel(tmp_path / "source", source=SOURCE.replace("threadIdx.x", "blockIdx.x"))
    if what == "header":
        write_kernel(tmp_path / "source", header=HEADER.replace("v.x", "v.z"))
    target = Target(find_architecture("sm_80")) if what == "architecture" else HOPPER
    width = 4 if what == "width" else None

    compile_kernel(spec, "BF16" if what == "format" else "FP32", target, only_width=width)

    assert len(compilations) == 2


@pytest.mark.parametrize("damage", ["bit", "end", "all"])
def test_a_damaged_entry_is_compiled_again(cache, tmp_path, compilations, caplog, damage):
    spec = write_kernel(tmp_path / "source")
    expected = compile_kernel(spec, "FP32", HOPPER)
    (entry,) = entries(cache)
    content = bytearray(entry.read_bytes())
    content[1000] ^= 16
    entry.write_bytes({"bit": content, "end": content[:500], "all": b"\n"}[damage])

    assert compile_kernel(spec, "FP32", HOPPER) == expected
    assert compile_kernel(spec, "FP32", HOPPER) == expected
    assert len(compilations) == 2
    assert [str(cache) in record.getMessage() for record in caplog.records] == [True]


def test_a_folder_that_cannot_be_made_costs_time_only(tmp_path, monkeypatch, caplog, cache):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DYNAMIQ_CACHE", str(tmp_path / "file"))
    spec = write_kernel(tmp_path / "source")

    assert compile_kernel(spec, "FP32", HOPPER) == compile_kernel(spec, "FP32", HOPPER)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "set DYNAMIQ_CACHE to another folder" in record.getMessage()


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, caplog, cache):
    from cuda.core.utils import FileStreamProgramCache

    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(FileStreamProgramCache, "__setitem__", refuse)
    spec = write_kernel(tmp_path / "source")

    assert compile_kernel(spec, "FP32", HOPPER) == compile_kernel(spec, "FP32", HOPPER)
    assert ["Read-only file system" in record.getMessage() for record in caplog.records] == [True]


def test_a_user_without_a_home_compiles(tmp_path, monkeypatch, caplog, cache):
    def refuse():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(nvrtc, "cache_folder", refuse)

    compile_kernel(write_kernel(tmp_path / "source"), "FP32", HOPPER)
    assert "Could not determine home directory" in caplog.text


def test_an_error_shows_the_line(cache, tmp_path):
    spec = write_kernel(tmp_path / "source", SOURCE.replace("combine(", "combined("))

    with pytest.raises(KernelError, match="kernel sample cannot be compiled for sm_90a") as caught:
        compile_kernel(spec, "FP32", HOPPER)

    message = str(caught.value)
    assert 'identifier "combined" is undefined' in message
    assert "--- sample.cu\n" in message
    assert "\n>    5 |     if (i < last) a.y[i] = combined(a.x[i], a.y[i]);" in message
    assert "\n     4 |     long long i = first + threadIdx.x;" in message
    assert not entries(cache), "a failure must not be kept"


def test_an_error_in_a_header_shows_its_line(cache, tmp_path):
    spec = write_kernel(tmp_path / "source", header=HEADER.replace("v.y;", "v.q;"))

    with pytest.raises(KernelError, match=r"--- combine\.cuh(\n.*)*\n>    3 \| __device__ float"):
        compile_kernel(spec, "FP32", HOPPER)


def test_a_missing_header_is_named(cache, tmp_path):
    spec = write_kernel(tmp_path / "source", SOURCE.replace("combine.cuh", "absent.cuh"))

    with pytest.raises(KernelError, match=r'>    2 \| #include "absent\.cuh"'):
        compile_kernel(spec, "FP32", HOPPER)


def test_a_missing_source_is_named(cache, tmp_path):
    spec = write_kernel(tmp_path / "source")
    spec.source.unlink()

    with pytest.raises(KernelError, match=r"kernel sample is not there: .*sample\.cu"):
        compile_kernel(spec, "FP32", HOPPER)


def test_a_row_is_asked_before_the_compiler(cache, compilations):
    with pytest.raises(KernelError, match="not written for entries in FP64"):
        compile_kernel(find_kernel("compress"), "FP64", HOPPER)
    assert not compilations


@pytest.fixture
def fresh():
    """What is known about the compiler is forgotten before and after."""
    nvrtc._compilable.cache_clear()
    yield
    nvrtc._compilable.cache_clear()


@pytest.mark.parametrize("missing", ["cuda", "cuda.core", "cuda.bindings"])
def test_without_the_extra_the_error_names_it(monkeypatch, fresh, missing):
    for name in [name for name in sys.modules if f"{name}.".startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(KernelError, match=r'pip install "dynamiq-allreduce\[gpu\]"'):
        compile_kernel(find_kernel("compress"), "FP32", HOPPER)


def test_without_libnvrtc_the_error_names_it(monkeypatch, fresh):
    from cuda.bindings import nvrtc as bindings
    from cuda.pathfinder import DynamicLibNotFoundError

    def refuse():
        raise DynamicLibNotFoundError("libnvrtc.so is nowhere")

    monkeypatch.setattr(bindings, "nvrtcGetSupportedArchs", refuse)

    with pytest.raises(KernelError, match=r"dynamiq-allreduce\[gpu\].*libnvrtc\.so is nowhere"):
        known_architectures()


def test_this_compiler_knows_all_rows():
    assert known_architectures() == ARCHITECTURES


def test_an_older_compiler_says_what_it_knows(monkeypatch):
    monkeypatch.setattr(nvrtc, "_compilable", lambda: frozenset({(8, 0), (8, 9)}))

    with pytest.raises(KernelError, match=r"cannot compile for sm_90a; it knows sm_80, sm_89;"):
        compile_kernel(find_kernel("compress"), "FP32", HOPPER)


def test_ptx_for_gpus_that_are_not_there_yet():
    """cuda.core asks the driver before it makes PTX, so here NVRTC itself gets our options."""
    from cuda.bindings import nvrtc as bindings

    def checked(returned):
        assert returned[0] == bindings.nvrtcResult.NVRTC_SUCCESS
        return returned[1] if len(returned) == 2 else None

    spec, target = find_kernel("compress"), Target(NEWEST[1].without_suffix, "ptx")
    options = nvrtc._options(spec, "FP32", target, None).as_bytes("nvrtc")
    source = spec.source.read_bytes()
    program = checked(bindings.nvrtcCreateProgram(source, b"compress.cu", 0, None, None))
    checked(bindings.nvrtcCompileProgram(program, len(options), options))
    ptx = bytearray(checked(bindings.nvrtcGetPTXSize(program)))
    checked(bindings.nvrtcGetPTX(program, ptx))
    checked(bindings.nvrtcDestroyProgram(program))

    assert b".target sm_120\n" in ptx
    assert b".visible .entry compress(" in ptx


def assert_well_compiled(name, entry_format, architecture):
    spec = find_kernel(name)
    compiled = compile_kernel(spec, entry_format, Target(architecture))
    listing = disassemble(compiled.code, name)
    family = import_module(f"dynamiq.kernels.{spec.family}.arguments")
    structure = getattr(family, name.title().replace("_", ""))

    assert compiled.resources.local_bytes == 0
    assert (listing.spill_stores_bytes, listing.spill_loads_bytes) == (0, 0)
    # Neighbours of what a thread of `mix` reads are read by other threads; `fill` reads doubles.
    assert listing.widest_load_bytes == {"mix": 4, "fill": 8}.get(name, 16)
    assert compiled.resources.parameter_bytes == (ctypes.sizeof(structure), 8, 8)


@pytest.mark.parametrize("architecture", NEWEST, ids=str)
@pytest.mark.parametrize(("name", "entry_format"), BUILDS)
def test_kernels_stay_in_registers_and_load_16_bytes(name, entry_format, architecture):
    assert_well_compiled(name, entry_format, architecture)


@pytest.mark.parametrize("name", [spec.name for spec in KERNELS.values() if spec.has_widths])
def test_a_build_for_one_width_holds_no_other(name):
    """Else the report's instructions per entry would not be those of the width."""
    builds = [
        compile_kernel(find_kernel(name), "FP32", HOPPER, only_width=width) for width in (None, 4)
    ]
    every, one = (len(disassemble(build.code, name).instructions) for build in builds)
    assert one < 0.9 * every


@pytest.mark.soak
@pytest.mark.parametrize("architecture", OTHERS, ids=str)
@pytest.mark.parametrize(("name", "entry_format"), BUILDS)
def test_on_all_other_architectures_too(name, entry_format, architecture):
    assert_well_compiled(name, entry_format, architecture)
