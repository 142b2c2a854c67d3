"""The host build: the kernels' sources, compiled by the machine's C++ compiler at first use.

The only module that runs a C++ compiler. Libraries are kept in the cache folder under a digest of
sources, flags and all that the compiler says about itself and this CPU; of several processes that
start at once, one compiles and the others wait.

Variables: ``CXX`` is the compiler's command. ``DYNAMIQ_HOST_FLAGS`` are flags after those below,
for instance ``-march=x86-64-v3``, so that all CPUs of a mixed cluster share what one of them made.
They must leave arithmetic as it is (no ``-ffast-math``), or ranks no longer agree.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from dynamiq.core.errors import KernelError
from dynamiq.kernels.cache import cache_folder, source_digest
from dynamiq.kernels.registry import KernelSpec, built_together
from dynamiq.kernels.threads import in_parts

COMPILERS = ("c++", "g++", "clang++")

# No contraction and no fast math: results must be those of every other build. Nothing here sets
# errno or traps, and saying so lets the compiler vectorise. -w: GCC's AVX-512 header warns.
FLAGS = (
    *("-x", "c++", "-std=c++17", "-O3", "-march=native", "-w"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)

_DIGEST_BYTES = 32
_ROOM_BYTES = 1 << 22
"""What compiling takes, generously."""
_log = logging.getLogger(__name__)


class Library:
    """A family's kernels for one entry format ("FP32", "BF16", "FP16"); None if they read none."""

    def __init__(self, family: str, entry_format: str | None) -> None:
        """Load the kernels, compiling those that the cache does not have.

        Raises:
            KernelError: There is no compiler, or it fails, or what it made cannot be loaded.
        """
        with _compiled(
            find_compiler(), built_together(family, entry_format), entry_format
        ) as paths:
            self._functions = {path.stem: _function(path) for path in paths}

    def run(self, kernel: str, arguments: ctypes.Structure, count: int) -> None:
        """Run a kernel on ``count`` supergroups, with as many threads as torch would use.

        The GIL is released meanwhile. Deterministic: results do not depend on the threads.
        """
        function, pointer = self._functions[kernel], ctypes.byref(arguments)
        in_parts(lambda first, last: function(pointer, first, last), count)


@cache
def library(family: str, entry_format: str | None) -> Library | None:
    """Return a family's kernels for an entry format; None, with a warning, if there is no way."""
    try:
        return Library(family, entry_format)
    except KernelError as error:
        # compress, 2^20 entries of 4 bits, one thread of an AVX-512 CPU: 15 instead of 608 million
        # entries/s; python -m evaluation.kernels --entries 1048576, with CXX=false and without.
        entries = f" for {entry_format}" if entry_format else ""
        warnings.warn(
            f"dynamiq does what its {family} kernels do{entries} in torch operations, up to 40 "
            f"times slower: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def find_compiler() -> tuple[str, ...]:
    """Return the command of the C++ compiler: ``$CXX``, or the first of COMPILERS that exists.

    Raises:
        KernelError: There is none.
    """
    if chosen := _words("CXX"):
        return tuple(chosen)
    for name in COMPILERS:
        if path := shutil.which(name):
            return (path,)
    raise KernelError(
        f"no C++ compiler: none of {', '.join(COMPILERS)} is on PATH; install one (Debian and "
        f"Ubuntu: apt-get install g++), or name one in CXX"
    )


def flags() -> list[str]:
    """Return the compiler's flags: FLAGS, then those of ``$DYNAMIQ_HOST_FLAGS``."""
    return [*FLAGS, *_words("DYNAMIQ_HOST_FLAGS")]


def _words(variable: str) -> list[str]:
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise KernelError(f"{variable}={text!r} is not a command line: {error}") from error


@contextlib.contextmanager
def _compiled(
    compiler: tuple[str, ...], specs: Sequence[KernelSpec], entry_format: str | None
) -> Iterator[list[Path]]:
    """Provide a family's libraries: from the cache, or made and kept, or only made."""
    identity = _run([*compiler, *flags(), "-dM", "-E", os.devnull])
    family = specs[0]
    sources = source_digest(family.folder, family.root)
    digest = hashlib.sha256(sources + shlex.join(flags()).encode() + identity)
    with contextlib.ExitStack() as stack:
        try:
            name = (entry_format or "no-entries").lower()
            folder = cache_folder() / f"host-{digest.hexdigest()[:32]}" / name
            if not all(map(_is_intact, _paths(specs, folder))):
                folder.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context((folder / "lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Not only closed: a process forked meanwhile holds the file open, too.
                stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
                for unfinished in folder.glob("making-*"):  # by a process that was killed
                    shutil.rmtree(unfinished, ignore_errors=True)
                _compile_missing(compiler, specs, entry_format, folder)
        except (OSError, RuntimeError, KernelError) as error:
            if isinstance(error, KernelError) and _has_room(folder):
                raise
            _log.warning(
                "kernels are compiled for this process alone, since they cannot be kept (%s); "
                "set DYNAMIQ_CACHE to another folder",
                error,
            )
            try:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamiq-")))
                _compile_missing(compiler, specs, entry_format, folder)
            except OSError as error:
                raise KernelError(f"there is no place for compiled kernels: {error}") from error
        yield _paths(specs, folder)


def _has_room(folder: Path) -> bool:
    """Return whether a compiler that failed cannot blame the folder that it wrote to."""
    return folder.is_dir() and shutil.disk_usage(folder).free > _ROOM_BYTES


def _paths(specs: Sequence[KernelSpec], folder: Path) -> list[Path]:
    return [folder / f"{spec.name}.so" for spec in specs]


def _function(path: Path) -> "ctypes._NamedFuncPointer":
    """Return a kernel: void(const Arguments *, int64 first, int64 last)."""
    try:
        function = getattr(ctypes.CDLL(str(path)), path.stem)
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"what the C++ compiler made cannot be loaded; set CXX to another compiler, or "
            f"DYNAMIQ_CACHE to a folder from which programs may be run: {error}"
        ) from error
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    function.restype = None
    return function  # type: ignore[no-any-return]


def _compile_missing(
    compiler: tuple[str, ...], specs: Sequence[KernelSpec], entry_format: str | None, folder: Path
) -> None:
    paths = zip(specs, _paths(specs, folder), strict=True)
    missing = [(spec, path) for spec, path in paths if not _is_intact(path)]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda m: _compile(compiler, m[0], entry_format, m[1]), missing))


def _compile(
    compiler: tuple[str, ...], spec: KernelSpec, entry_format: str | None, path: Path
) -> None:
    """Compile a kernel, and put it in place in one step, with its digest after its last byte."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
        made = Path(folder) / path.name
        options = [f"-DENTRY_{entry_format}"] if entry_format else []
        options += [f"-I{spec.root}", "-shared", "-fPIC", "-o", str(made)]
        command = [*compiler, *flags(), *options, str(spec.source)]
        _run(command)
        if not made.is_file():
            raise KernelError(
                f"the C++ compiler ended well but made nothing; set CXX to another one.\n"
                f"{shlex.join(command)}"
            )
        content = made.read_bytes()
        made.write_bytes(content + hashlib.sha256(content).digest())
        made.replace(path)


def _is_intact(path: Path) -> bool:
    """Return whether a library is there and whole: loading a damaged one can kill the process."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    digest = hashlib.sha256(content[:-_DIGEST_BYTES]).digest()
    return digest == content[-_DIGEST_BYTES:]


def _run(command: list[str]) -> bytes:
    try:
        return subprocess.run(
            command, check=True, capture_output=True, stdin=subprocess.DEVNULL
        ).stdout
    except OSError as error:
        raise KernelError(
            f"the C++ compiler {command[0]} cannot be run; set CXX to another one: {error}"
        ) from error
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip()[:2000]
        raise KernelError(
            f"the C++ compiler fails with status {error.returncode}; set CXX to another one, or "
            f"DYNAMIQ_HOST_FLAGS to other flags.\n"
            f"{shlex.join(command)}\n{said}"
        ) from error
