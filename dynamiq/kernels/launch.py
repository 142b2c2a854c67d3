"""Starts kernels on a GPU, on torch's current stream; nothing here waits for the GPU.

``cuda.core.launch`` takes numbers and buffers but no structures, so kernels are loaded and launched
through the driver's own functions. What was compiled for a GPU stays loaded until the process ends.
"""

import ctypes
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from dynamiq.core.errors import KernelError
from dynamiq.kernels.nvrtc import CompiledKernel, compile_kernel, known_architectures
from dynamiq.kernels.registry import built_together, find_kernel, for_device

THREADS_PER_SUPERGROUP = 16
THREADS_PER_BLOCK = 128


def launch(
    name: str,
    entry_format: str | None,
    device: torch.device,
    arguments: ctypes.Structure,
    count: int,
) -> None:
    """Enqueue a kernel for the supergroups 0 to ``count`` - 1 on the device's current stream.

    The first launch on a device compiles and loads the kernel. ``arguments`` are copied before this
    returns; the tensors whose addresses they hold must live until the stream has come this far.

    Args:
        name: The kernel.
        entry_format: How the bucket's entries are stored; None for kernels that read none.
        device: The CUDA device on which all of the tensors are.
        arguments: The kernel's structure.
        count: How many supergroups there are; with 0, nothing is launched.

    Raises:
        KernelError: The device is no CUDA device that is there, the structure has another size than
            the kernel's, or the kernel cannot be compiled, loaded or launched.
    """
    index = _index(device)
    if count == 0:
        return
    with torch.cuda.device(index):
        kernel = _loaded(name, entry_format, index)
        enqueue(_driver(), kernel, torch.cuda.current_stream(index).cuda_stream, arguments, count)


@cache
def launcher(
    family: str, entry_format: str | None, device: torch.device
) -> Callable[[str, ctypes.Structure, int], None] | None:
    """Return :func:`launch` for a family, entry format and device: called as the host build is.

    Where no kernel can be compiled for the device it is None, after a warning.
    """
    try:
        index = _index(device)
        with torch.cuda.device(index):
            # All at once, before any of them has written something.
            for spec in built_together(family, entry_format):
                _loaded(spec.name, entry_format, index)
    except KernelError as error:
        entries = f" for {entry_format}" if entry_format else ""
        warnings.warn(
            f"dynamiq does what its {family} kernels do{entries} on {device} in torch operations, "
            f"many times slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return lambda name, arguments, count: launch(name, entry_format, device, arguments, count)


@dataclass(frozen=True)
class LoadedKernel:
    """A kernel that the driver knows.

    Attributes:
        handle: The driver's CUkernel.
        name: The kernel's name.
        arguments_bytes: Size of its structure; None if it was loaded as PTX, which does not say.
    """

    handle: Any
    name: str
    arguments_bytes: int | None


def load(driver: Any, compiled: CompiledKernel) -> LoadedKernel:
    """Load compiled code into the current context.

    Args:
        driver: The module ``cuda.bindings.driver``.
        compiled: The kernel.

    Raises:
        KernelError: The driver refuses it.
    """
    doing = f"load the kernel {compiled.name} ({compiled.target})"
    no_options: tuple[Any, ...] = ([], [], 0)
    # PTX ends with a NUL. Machine code says how long it is.
    code = compiled.code + b"\0" if compiled.target.form == "ptx" else compiled.code
    (library,) = _call(driver, doing, driver.cuLibraryLoadData(code, *no_options, *no_options))
    name = compiled.name.encode()
    (handle,) = _call(driver, doing, driver.cuLibraryGetKernel(library, name))
    resources = compiled.resources
    size = None if resources is None else resources.parameter_bytes[0]
    return LoadedKernel(handle, compiled.name, size)


def enqueue(
    driver: Any, kernel: LoadedKernel, stream: int, arguments: ctypes.Structure, count: int
) -> None:
    """Launch a loaded kernel for the supergroups 0 to ``count`` - 1.

    Args:
        driver: The module ``cuda.bindings.driver``.
        kernel: What :func:`load` returned.
        stream: The driver's handle of a stream of the current context.
        arguments: The kernel's structure, copied before this returns.
        count: How many supergroups there are, at least 1.

    Raises:
        KernelError: The structure has another size than the kernel's, or the driver refuses.
    """
    size = ctypes.sizeof(arguments)
    if kernel.arguments_bytes not in (None, size):
        raise KernelError(
            f"the kernel {kernel.name} takes a structure of {kernel.arguments_bytes} bytes, but "
            f"{type(arguments).__name__} has {size}; the two declarations must have the same fields"
        )
    bounds = (ctypes.c_longlong(0), ctypes.c_longlong(count))
    addresses = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (arguments, *bounds)))
    grid, block = (blocks(count), 1, 1), (THREADS_PER_BLOCK, 1, 1)
    status = driver.cuLaunchKernel(
        kernel.handle, *grid, *block, 0, stream, ctypes.addressof(addresses), 0
    )
    _call(driver, f"launch the kernel {kernel.name} with {grid[0]} blocks", status)


def blocks(count: int) -> int:
    """Return how many blocks of threads work on ``count`` supergroups."""
    return -(-count * THREADS_PER_SUPERGROUP // THREADS_PER_BLOCK)


@cache
def _loaded(name: str, entry_format: str | None, index: int) -> LoadedKernel:
    target = for_device(*torch.cuda.get_device_capability(index), known_architectures())
    return load(_driver(), compile_kernel(find_kernel(name), entry_format, target))


def _index(device: torch.device) -> int:
    if device.type != "cuda":
        raise KernelError(f"kernels run on CUDA devices, and the tensors are on {device}")
    if not torch.cuda.is_available():
        raise KernelError(f"{device} was asked for, but torch finds no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise KernelError(f"{device} was asked for, there are {torch.cuda.device_count()} devices")
    return index


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _call(driver: Any, doing: str, returned: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what a function of the driver gives besides its status."""
    status, *values = returned
    if status:
        _, text = driver.cuGetErrorString(status)
        reason = text.decode() if text else "unknown error"
        raise KernelError(f"cannot {doing}: {reason} (CUDA error {int(status)})")
    return tuple(values)
