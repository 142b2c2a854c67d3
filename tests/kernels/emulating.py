"""The GPU's code without a GPU: teams of 16 coroutines, with shuffles and shared memory."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

from dynamiq.kernels import host
from dynamiq.kernels.registry import SOURCE, find_kernel

EMULATOR = Path(__file__).parent / "emulation" / "emulate.cpp"


def emulator(folder: Path):
    """Return a function that compiles a kernel's GPU branch with the C++ compiler, once each.

    What it returns is called as a kernel of the host build is: arguments, first, last. With
    ``reverse`` the threads of a team run in the opposite order between two synchronisations.
    """

    @cache
    def function(kernel: str, entry_format: str | None, *, reverse: bool):
        path = folder / f"{kernel}-{entry_format}-{reverse}.so"
        flags = ["-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC"]
        source = find_kernel(kernel).source
        defines = [f"-DNAME={kernel}", f'-DKERNEL_FILE="{source}"']
        if entry_format:
            defines.append(f"-DENTRY_{entry_format}")
        order, folders = f"-DREVERSED={int(reverse)}", [f"-I{SOURCE}", "-o", path]
        command = [*host.find_compiler(), *flags, *defines, order, *folders, EMULATOR]
        subprocess.run(command, check=True)
        emulate = ctypes.CDLL(str(path)).emulate
        emulate.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        return emulate

    return function
