"""Compiles a kernel for a GPU with NVRTC, which needs none; the only module that does.

What was compiled is kept in the cache folder, see :mod:`dynamiq.kernels.cache`.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dynamiq.core.errors import KernelError
from dynamiq.kernels.architecture import Architecture, Target
from dynamiq.kernels.cache import cache_folder, source_digest
from dynamiq.kernels.cubin import Resources, read_resources
from dynamiq.kernels.registry import ARCHITECTURES, KernelSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel, compiled.

    Attributes:
        name: The function's name.
        target: What it was compiled for.
        code: A cubin, or PTX.
    """

    name: str
    target: Target
    code: bytes = field(repr=False)

    @property
    def resources(self) -> Resources | None:
        """What the kernel occupies; None for PTX, of which the driver makes machine code later."""
        return read_resources(self.code, self.name) if self.target.form == "cubin" else None


def compile_kernel(
    spec: KernelSpec, entry_format: str | None, target: Target, *, only_width: int | None = None
) -> CompiledKernel:
    """Compile a kernel, or take it from the cache.

    The result is a function of the sources, the arguments and NVRTC's version.

    Args:
        spec: The kernel's row.
        entry_format: How entries are stored; None for kernels that read none.
        target: Architecture and form.
        only_width: Specialise to this width of codes; for counting instructions.

    Raises:
        KernelError: The sources do not compile, this kernel or this NVRTC cannot be used for the
            target, or the extra ``gpu`` is not installed.
    """
    spec.check(entry_format, target.architecture)
    if target.architecture.capability not in _compilable():
        known = ", ".join(map(str, known_architectures()))
        raise KernelError(f"this NVRTC cannot compile for {target}; it knows {known}; update it")
    options = _options(spec, entry_format, target, only_width)
    try:
        source = spec.source.read_text("utf-8")
        key = _key(source, options, target, spec)
    except OSError as error:
        raise KernelError(f"the source of the kernel {spec.name} is not there: {error}") from error
    code = _cached(key, lambda: _compile(spec, source, options, target))
    return CompiledKernel(spec.name, target, code)


def known_architectures() -> tuple[Architecture, ...]:
    """Return the rows of the registry that the installed NVRTC can compile for.

    Raises:
        KernelError: The extra ``gpu`` is not installed.
    """
    return tuple(row for row in ARCHITECTURES if row.capability in _compilable())


def _options(
    spec: KernelSpec, entry_format: str | None, target: Target, only_width: int | None
) -> Any:
    """Return all that the compiler is told besides the source, as cuda.core's ProgramOptions."""
    from cuda.core import ProgramOptions

    macros: list[str | tuple[str, str]] = [f"ENTRY_{entry_format}"] if entry_format else []
    if only_width is not None:
        macros.append(("ONLY_WIDTH", str(only_width)))
    return ProgramOptions(
        name=spec.source.name,
        arch=str(target),
        std="c++17",
        fma=False,  # a fused multiply-add rounds once: other bits than the reference's
        include_path=[str(spec.folder), str(spec.root)],
        define_macro=macros or None,
    )


def _compile(spec: KernelSpec, source: str, options: Any, target: Target) -> bytes:
    from cuda.core import Program

    try:
        return bytes(Program(source, "c++", options=options).compile(target.form).code)
    except Exception as error:  # cuda.core's own exceptions derive from Exception only
        raise KernelError(
            f"the kernel {spec.name} cannot be compiled for {target}: {str(error).strip()}\n"
            f"{_excerpts(str(error), (spec.folder, spec.root))}"
        ) from error


def _excerpts(log: str, folders: Iterable[Path]) -> str:
    """Return the lines around the first errors of a log, with their numbers."""
    places = re.findall(r"^(.+?)\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE)
    parts = []
    for name, number in list(dict.fromkeys(places))[:3]:
        wrong = int(number)
        path = next((p for f in folders if (p := f / Path(name).name).exists()), None)
        if path is None:
            continue
        lines = list(enumerate(path.read_text("utf-8").splitlines(), start=1))
        shown = lines[max(0, wrong - 4) : wrong + 3]
        text = (f"{'>' if n == wrong else ' '}{n:5} | {line}" for n, line in shown)
        parts.append("\n".join([f"--- {path.name}", *text]))
    return "\n".join(parts)


def _key(source: str, options: Any, target: Target, spec: KernelSpec) -> bytes:
    from cuda.core.utils import make_program_cache_key

    key: bytes = make_program_cache_key(
        code=source,
        code_type="c++",
        options=options,
        target_type=target.form,
        extra_digest=source_digest(spec.folder, spec.root),  # of the headers
    )
    return key


def _cached(key: bytes, compile_: Callable[[], bytes]) -> bytes:
    """Return what was compiled under this key, or compile it; a broken cache only costs time.

    An entry is the code behind its SHA-256: a bit that is wrong in machine code shows nowhere else.
    """
    from cuda.core.utils import FileStreamProgramCache

    try:
        store = FileStreamProgramCache(cache_folder() / "nvrtc")
        entry = store.get(key, b"")
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        _warn_once(f"compiling without a cache, in every process again: {error}")
        return compile_()
    digest, code = entry[:32], bytes(entry[32:])
    if digest and hashlib.sha256(code).digest() == digest:
        return code
    if digest:
        _warn_once(f"an entry of the cache in {cache_folder()} is damaged: compiling it again")
    code = compile_()
    try:
        store[key] = hashlib.sha256(code).digest() + code
    except OSError as error:
        _warn_once(f"compiled code is not kept for the next process: {error}")
    return code


@cache
def _warn_once(message: str) -> None:
    logger.warning("%s; set DYNAMIQ_CACHE to another folder", message)


@cache
def _compilable() -> frozenset[tuple[int, int]]:
    """The compute capabilities that the installed NVRTC knows."""
    try:
        from cuda.bindings import nvrtc
        from cuda.core import Program  # noqa: F401  both or none

        status, numbers = nvrtc.nvrtcGetSupportedArchs()
    except (ImportError, RuntimeError) as error:  # RuntimeError: there is no libnvrtc
        raise KernelError(
            f'compiling for a GPU needs NVRTC: pip install "dynamiq-allreduce[gpu]" ({error})'
        ) from error
    if status.value:
        raise KernelError(f"NVRTC does not say which architectures it knows: {status.name}")
    return frozenset(divmod(number, 10) for number in numbers)
