"""Launching: what is checked, what the driver is handed; and on a GPU, that the kernels run."""

import ctypes
import os
import re
import shutil
import subprocess
import sys
from ctypes import c_float, c_int32, c_int64, c_longlong, c_void_p
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dynamiq.core.errors import KernelError
from dynamiq.kernels import launch, registry
from dynamiq.kernels.architecture import Architecture, Target
from dynamiq.kernels.launch import LoadedKernel, blocks, enqueue, load
from dynamiq.kernels.nvrtc import CompiledKernel, compile_kernel
from dynamiq.kernels.registry import KERNELS, find_kernel, kernels_of
from tests.kernels.compiling import HOPPER, write_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


class Inner(ctypes.Structure):
    _fields_ = (("address", c_void_p), ("size", c_int64))


class Arguments(ctypes.Structure):
    _fields_ = (("inner", Inner), ("width", c_int32), ("factor", c_float))


def sample_arguments():
    return Arguments(Inner(0xABCDEF, -2), 3, 0.5)


class Driver:
    """Takes calls as ``cuda.bindings.driver`` does, and reads what it is pointed to at once."""

    def __init__(self, status=0):
        self.status = status
        self.calls = []

    def cuLibraryLoadData(self, code, *options):  # noqa: N802
        self.calls.append(("load", code, options))
        return self.status, "library"

    def cuLibraryGetKernel(self, library, name):  # noqa: N802
        self.calls.append(("kernel", library, name))
        return self.status, "handle"

    def cuLaunchKernel(self, kernel, *rest):  # noqa: N802
        grid, block, (shared, stream, addresses, extra) = rest[:3], rest[3:6], rest[6:]
        pointers = (c_void_p * 3).from_address(addresses)
        arguments = Arguments.from_buffer_copy(ctypes.string_at(pointers[0], 24))
        bounds = tuple(c_longlong.from_address(pointer).value for pointer in pointers[1:])
        self.calls.append(("launch", kernel, grid, block, shared, stream, extra))
        self.arguments, self.bounds = arguments, bounds
        return (self.status,)

    def cuGetErrorString(self, status):  # noqa: N802
        return 0, b"out of memory"


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 3), (2**31, 2**28)]
)
def test_eight_supergroups_share_a_block(count, expected):
    assert blocks(count) == expected


def test_the_structure_and_the_range_are_passed_by_value():
    driver = Driver()
    enqueue(driver, LoadedKernel("handle", "sample", 24), 77, sample_arguments(), 17)

    assert driver.calls == [("launch", "handle", (3, 1, 1), (128, 1, 1), 0, 77, 0)]
    assert driver.bounds == (0, 17)
    assert bytes(driver.arguments) == bytes(sample_arguments())
    assert driver.arguments.inner.address == 0xABCDEF


def test_a_structure_of_another_size_is_refused():
    driver = Driver()
    with pytest.raises(KernelError, match="structure of 32 bytes, but Arguments has 24; the two"):
        enqueue(driver, LoadedKernel("handle", "sample", 32), 77, sample_arguments(), 17)
    assert not driver.calls


def test_a_refusal_says_what_was_tried_and_why():
    with pytest.raises(
        KernelError,
        match=r"cannot launch the kernel sample with 3 blocks: out of memory \(CUDA error 2\)",
    ):
        enqueue(Driver(2), LoadedKernel("handle", "sample", 24), 77, sample_arguments(), 17)


def test_a_cubin_is_loaded_and_knows_its_arguments():
    compiled = compile_kernel(find_kernel("store"), "FP32", HOPPER)
    driver = Driver()

    kernel = load(driver, compiled)

    assert driver.calls[0] == ("load", compiled.code, ([], [], 0, [], [], 0))
    assert driver.calls[1] == ("kernel", "library", b"store")
    assert kernel == LoadedKernel("handle", "store", compiled.resources.parameter_bytes[0])


def test_ptx_is_handed_over_as_a_c_string():
    driver = Driver()
    target = Target(Architecture(12, 0), "ptx")

    kernel = load(driver, CompiledKernel("store", target, b".version 9.0"))

    assert driver.calls[0][1] == b".version 9.0\0"
    assert kernel.arguments_bytes is None
    enqueue(driver, kernel, 77, sample_arguments(), 1)


def test_code_that_the_driver_refuses_names_kernel_and_target():
    compiled = CompiledKernel("store", Target(Architecture(12, 0), "ptx"), b"")
    with pytest.raises(KernelError, match=r"cannot load the kernel store \(compute_120\): out"):
        load(Driver(2), compiled)


def test_tensors_on_the_cpu_are_refused():
    with pytest.raises(KernelError, match="run on CUDA devices, and the tensors are on cpu"):
        launch.launch("store", "FP32", CPU, sample_arguments(), 1)


def test_without_a_gpu_the_error_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="cuda:0 was asked for, but torch finds no CUDA device"):
        launch.launch("store", "FP32", CUDA, sample_arguments(), 1)


@pytest.fixture
def pretended(monkeypatch):
    """Two GPUs of compute capability 9.0, as far as torch is asked, over a pretended driver."""
    driver, entered = Driver(), []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            entered.append(self.index)

        def __exit__(self, *_):
            entered.append(None)

    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_device_capability": lambda index: (9, 0),
        "current_stream": lambda index: SimpleNamespace(cuda_stream=100 + index),
        "device": Device,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    launch._loaded.cache_clear()
    launch.launcher.cache_clear()
    yield SimpleNamespace(driver=driver, entered=entered)
    launch._loaded.cache_clear()
    launch.launcher.cache_clear()


def store_arguments():
    size = compile_kernel(find_kernel("store"), "FP32", HOPPER).resources.parameter_bytes[0]
    return type("Store", (ctypes.Structure,), {"_fields_": (("x", ctypes.c_char * size),)})()


@pytest.mark.parametrize(("device", "index"), [("cuda:0", 0), ("cuda:1", 1), ("cuda", 1)])
def test_kernels_run_on_the_current_stream_of_the_tensors_device(pretended, device, index):
    run = launch.launcher("supergroups", "FP32", torch.device(device))

    run("store", store_arguments(), 9)
    run("store", store_arguments(), 8)

    kinds = [call[0] for call in pretended.driver.calls]
    assert kinds == ["load", "kernel"] * len(kernels_of("supergroups")) + ["launch"] * 2
    assert [call[5] for call in pretended.driver.calls[-2:]] == [100 + index] * 2
    assert pretended.entered == [index, None] * 3


def test_each_device_and_format_loads_its_own(pretended):
    for entry_format in ("FP32", "BF16"):
        for index in (0, 1):
            run = launch.launcher("supergroups", entry_format, torch.device("cuda", index))
            run("store", store_arguments(), 1)
    assert [call[0] for call in pretended.driver.calls].count("load") == 4 * len(
        kernels_of("supergroups")
    )


def test_a_gpu_without_kernels_gets_the_reference_and_one_warning(pretended, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.warns(RuntimeWarning, match="on cuda:0 in torch operations.*sm_80") as warned:
        assert launch.launcher("supergroups", "FP32", CUDA) is None
        assert launch.launcher("supergroups", "FP32", CUDA) is None
    assert len(warned) == 1


def test_nothing_to_do_launches_nothing(pretended):
    launch.launch("store", "FP32", CUDA, store_arguments(), 0)
    assert not pretended.driver.calls


def test_a_device_that_is_not_there_is_refused(pretended):
    with pytest.raises(KernelError, match="cuda:2 was asked for, there are 2 devices"):
        launch.launch("store", "FP32", torch.device("cuda", 2), store_arguments(), 1)


def test_an_unknown_kernel_is_refused(pretended):
    with pytest.raises(KernelError, match="no kernel is named 'stor'"):
        launch.launch("stor", "FP32", CUDA, store_arguments(), 1)


THROUGH_THE_BINDINGS = """
from cuda.bindings import driver
from dynamiq.core.errors import KernelError
from dynamiq.kernels.launch import LoadedKernel, enqueue, load
from dynamiq.kernels.nvrtc import CompiledKernel, compile_kernel
from dynamiq.kernels.registry import find_kernel
from tests.kernels.compiling import HOPPER
from tests.kernels.test_launch import *

kernel = load(driver, compile_kernel(find_kernel("store"), "FP32", HOPPER))
enqueue(driver, LoadedKernel(kernel.handle, "sample", 24), 0x77, sample_arguments(), 17)
ptx = Target(Architecture(12, 0), "ptx")
load(driver, CompiledKernel("store", ptx, b".version 9.0"))
try:
    load(driver, CompiledKernel("store", ptx, b"refuse me"))
except KernelError as error:
    print(error, flush=True)
"""


def test_the_real_bindings_hand_it_over(tmp_path):
    """The pretended driver above is called as the real one must be: here, by cuda.bindings."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler, cc or gcc, for a driver that writes down its calls")
    source = Path(__file__).with_name("driver.c")
    library = tmp_path / "libcuda.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)

    run = subprocess.run(
        [sys.executable, "-c", THROUGH_THE_BINDINGS],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    arguments = bytes(sample_arguments()).hex()
    assert sorted(lines) == sorted(
        [
            "load ELF options=0,0",
            "kernel store of 0x1111",
            "launch 0x2222 grid=3,1,1 block=128,1,1 shared=0 stream=0x77 extra=0 "
            f"first=0 last=17 arguments={arguments}",
            "load .version 9.0 options=0,0",
            "kernel store of 0x1111",
            "load refuse me options=0,0",
            "cannot load the kernel store (compute_120): a PTX JIT failed (CUDA error 218)",
        ]
    )


class Sample(ctypes.Structure):
    _fields_ = (("x", c_void_p), ("y", c_void_p), ("width", c_int32))


@pytest.mark.gpu
def test_a_kernel_runs_on_a_gpu_behind_what_its_stream_already_does(tmp_path, monkeypatch):
    monkeypatch.setitem(KERNELS, "sample", write_kernel(tmp_path / "source"))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.arange(128 * 4, dtype=torch.float32, device=CUDA)
        y = torch.full((128,), 2.0, device=CUDA)
        unused = torch.empty_like(y)
        # The first launch compiles and loads.
        launch.launch("sample", "FP32", CUDA, Sample(x.data_ptr(), unused.data_ptr(), 0), 17)
        stream.synchronize()
        torch.cuda._sleep(100_000_000)
        launch.launch("sample", "FP32", CUDA, Sample(x.data_ptr(), y.data_ptr(), 0), 17)
        assert not stream.query(), "a launch must not wait for the GPU"
    stream.synchronize()

    expected = torch.full((128,), 2.0)
    expected[:17] = x.view(128, 4)[:17, 0].cpu() * 2.0 + x.view(128, 4)[:17, 1].cpu()
    assert torch.equal(y.cpu(), expected)


@pytest.mark.gpu
def test_ptx_runs_on_a_gpu(tmp_path):
    capability = Architecture(*torch.cuda.get_device_capability(CUDA))
    spec = write_kernel(tmp_path / "source")
    x, y = torch.ones(512, device=CUDA), torch.full((128,), 2.0, device=CUDA)

    compiled = compile_kernel(spec, "FP32", Target(capability, "ptx"))
    kernel = load(launch._driver(), compiled)
    stream = torch.cuda.current_stream().cuda_stream
    enqueue(launch._driver(), kernel, stream, Sample(x.data_ptr(), y.data_ptr(), 0), 17)

    assert y.cpu().tolist() == [3.0] * 17 + [2.0] * 111


@pytest.mark.gpu
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_loads_on_a_gpu(name):
    torch.zeros(1, device=CUDA)  # makes the context that tensors would have made
    with torch.cuda.device(CUDA):
        entry_format = "FP32" if KERNELS[name].entry_formats else None
        assert launch._loaded(name, entry_format, 0).name == name


def test_blocks_are_of_the_size_that_the_sources_share_memory_for():
    team = (registry.SOURCE / "team.cuh").read_text("utf-8")
    teams = int(re.search(r"#define TEAMS_PER_BLOCK (\d+)", team)[1])
    assert teams * launch.THREADS_PER_SUPERGROUP == launch.THREADS_PER_BLOCK
