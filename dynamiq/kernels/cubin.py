"""What a cubin says about itself: registers, stack, shared memory, parameters.

A cubin is an ELF file. Its sections ``.nv.info`` and ``.nv.info.<kernel>`` are lists of attributes,
named ``EIATTR_…`` by NVIDIA's tools; their layout here is what ``nvdisasm`` prints, and the tests
compare the numbers with what the assembler itself reports.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from dynamiq.core.errors import KernelError

_SYMBOL_TABLE, _NO_BITS = 2, 8  # section types of ELF
_SIZED = 4  # the form of an attribute whose value has a size; all others are one 16-bit number
_REGISTERS, _STACK, _PARAMETER = 0x2F, 0x12, 0x17  # EIATTR_REGCOUNT, _MIN_STACK_SIZE, _KPARAM_INFO
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class Resources:
    """What one thread or block of a kernel occupies.

    Attributes:
        registers: 32-bit registers of a thread.
        local_bytes: Local memory of a thread, which lies in the GPU's main memory: spilled
            registers, arrays with indices that the compiler does not know, and stack.
        shared_bytes: Statically sized shared memory of a block, without what the system reserves.
        parameter_bytes: Sizes of the kernel's parameters.
    """

    registers: int
    local_bytes: int
    shared_bytes: int
    parameter_bytes: tuple[int, ...]


def read_resources(cubin: bytes, kernel: str) -> Resources:
    """Read what a kernel of a cubin occupies.

    Raises:
        KernelError: The bytes are no cubin, or hold no such kernel.
    """
    try:
        sections = _sections(cubin)
        own = dict(_of_kernel(sections, kernel))
        parameters = sorted(
            struct.unpack("<IHHI", value)[1:]
            for code, value in _attributes(sections[f".nv.info.{kernel}"].content)
            if code == _PARAMETER
        )
        return Resources(
            registers=own[_REGISTERS],
            local_bytes=own.get(_STACK, 0),
            shared_bytes=_shared_bytes(sections, kernel),
            parameter_bytes=tuple(flags >> 18 for _, _, flags in parameters),
        )
    except (struct.error, IndexError, KeyError, ValueError) as error:
        raise KernelError(
            f"no kernel {kernel} can be read from {len(cubin)} bytes, which should be the cubin "
            f"that NVRTC made of it: {error!r}"
        ) from error


@dataclass(frozen=True)
class _Section:
    kind: int
    size: int
    content: bytes


def _sections(cubin: bytes) -> dict[str, _Section]:
    if cubin[:5] != b"\x7fELF\x02":
        raise ValueError("it is no 64-bit ELF file")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    _, _, _, _, names_at, _ = headers[names]
    return {
        _text(cubin, names_at + name): _Section(
            kind, length, b"" if kind == _NO_BITS else cubin[at : at + length]
        )
        for name, kind, _, _, at, length in headers
    }


def _of_kernel(sections: dict[str, _Section], kernel: str) -> Iterator[tuple[int, int]]:
    """Yield the attributes that .nv.info lists by symbol: registers and stack."""
    table, names = sections[".symtab"], sections[".strtab"].content
    if table.kind != _SYMBOL_TABLE:
        raise ValueError("its .symtab is no symbol table")
    symbols = [_text(names, name) for name, *_ in struct.iter_unpack("<IBBHQQ", table.content)]
    for code, value in _attributes(sections[".nv.info"].content):
        if code in (_REGISTERS, _STACK):
            symbol, number = struct.unpack("<II", value)
            if symbols[symbol] == kernel:
                yield code, number


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(content):
        form, code, size = struct.unpack_from("<BBH", content, at)
        at += 4
        if form == _SIZED:
            yield code, content[at : at + size]
            at += size


def _shared_bytes(sections: dict[str, _Section], kernel: str) -> int:
    section = sections.get(f".nv.shared.{kernel}")
    if section is None:
        return 0
    # From compute capability 9 on, the system's share of a block lies in front of the kernel's own.
    has_reserved = any(name.startswith(".nv.shared.reserved.") for name in sections)
    return section.size - (_RESERVED_SHARED_BYTES if has_reserved else 0)


def _text(content: bytes, at: int) -> str:
    return content[at : content.index(b"\0", at)].decode()
