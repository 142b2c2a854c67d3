"""What can be compiled for a GPU: the kernels, the entry formats and the architectures.

An architecture in this table is one that the kernels are compiled for, no more: ``verified_on``
says where a kernel has run and given the reference's bits.
"""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dynamiq.core.errors import KernelError
from dynamiq.kernels.architecture import Architecture, Target

SOURCE = Path(__file__).parent / "source"
ENTRY_DTYPES = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
"""What kernels read and write, by dtype."""
ENTRY_FORMATS = tuple(ENTRY_DTYPES.values())
"""How entries may be stored; the macro is ``ENTRY_FP32``."""
WIDTHS = (*range(1, 11), 16)
"""Bits of a code that a kernel with widths can be specialised to."""

ARCHITECTURES = tuple(
    Architecture.parse(name)
    for name in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel.

    Attributes:
        name: The function's name.
        family: The format that it works for: the name of the folder of its source.
        has_widths: Whether it takes the width of codes as an argument.
        entry_formats: Formats of entries that it can be built for; () if it reads no entries.
        minimum: The oldest architecture that it can be built for.
        verified_on: Architecture → the GPU on which the kernel gave the reference's bits.
        root: Where the folders of families are, and the headers that they share.
    """

    name: str
    family: str
    has_widths: bool = False
    entry_formats: tuple[str, ...] = ENTRY_FORMATS
    minimum: Architecture = ARCHITECTURES[0]
    verified_on: Mapping[Architecture, str] = field(default_factory=dict)
    root: Path = SOURCE

    @property
    def folder(self) -> Path:
        """Its source and the headers of its family."""
        return self.root / self.family

    @property
    def source(self) -> Path:
        """The file that defines it."""
        return self.folder / f"{self.name}.cu"

    def formats_among(self, asked: Sequence[str]) -> Sequence[str | None]:
        """Return those of some entry formats that it has; the one answer None if it reads none."""
        return (
            [name for name in asked if name in self.entry_formats] if self.entry_formats else [None]
        )

    def check(self, entry_format: str | None, architecture: Architecture) -> None:
        """Refuse what this kernel cannot be built for.

        Raises:
            KernelError: It has no such entry format, or the architecture is too old.
        """
        if entry_format not in (self.entry_formats or (None,)):
            raise KernelError(
                f"the kernel {self.name} is not written for entries in {entry_format}; use "
                f"{' or '.join(self.entry_formats) or 'no format: it reads none'}"
            )
        if architecture < self.minimum:
            raise KernelError(
                f"the kernel {self.name} needs {self.minimum} or newer, not {architecture}"
            )


KERNELS = {
    spec.name: spec
    for spec in (
        KernelSpec("statistics", "supergroups"),
        KernelSpec("compress", "supergroups", has_widths=True),
        KernelSpec("decompress", "supergroups", has_widths=True),
        KernelSpec("decompress_accumulate", "supergroups", has_widths=True),
        KernelSpec("decompress_accumulate_recompress", "supergroups", has_widths=True),
        KernelSpec("store", "supergroups"),
        KernelSpec("fill", "allocation", entry_formats=()),
        *(
            KernelSpec(name, "mx", entry_formats=("FP32",))
            for name in (
                "mx_compress",
                "mx_decompress",
                "mx_decompress_accumulate",
                "mx_decompress_accumulate_recompress",
            )
        ),
        KernelSpec("energies", "hadamard"),
        KernelSpec("rotate", "hadamard"),
        KernelSpec("mix", "hadamard"),
        KernelSpec("rotate_back", "hadamard"),
        KernelSpec("carry", "hadamard", entry_formats=()),
    )
}


def kernels_of(family: str) -> tuple[KernelSpec, ...]:
    """Return the kernels of one format."""
    return tuple(spec for spec in KERNELS.values() if spec.family == family)


def built_together(family: str, entry_format: str | None) -> tuple[KernelSpec, ...]:
    """Return what a build for an entry format holds; None is that of kernels that read no entries.

    A family may have both, so that what reads no entries is built once for all formats.
    """
    reads = entry_format is not None
    return tuple(spec for spec in kernels_of(family) if bool(spec.entry_formats) == reads)


def find_kernel(name: str) -> KernelSpec:
    """Return the row of a kernel.

    Raises:
        KernelError: There is none; the message lists what there is.
    """
    if name not in KERNELS:
        raise KernelError(f"no kernel is named {name!r}; there are {', '.join(KERNELS)}")
    return KERNELS[name]


def find_architecture(name: str) -> Architecture:
    """Return the row of an architecture, such as "sm_90a".

    Raises:
        KernelError: There is none; the message lists what there is.
    """
    asked = Architecture.parse(name)
    if asked not in ARCHITECTURES:
        raise KernelError(f"the kernels are not built for {name}; they are for {_listed()}")
    return asked


def for_device(
    major: int, minor: int, compilable: Collection[Architecture] = ARCHITECTURES
) -> Target:
    """Choose what to compile for a GPU of this compute capability.

    That is its own row of the table; else, with a line in the log, the newest machine code that
    runs on it; else the newest PTX, which the driver translates.

    Args:
        major: Major version of the compute capability.
        minor: Its minor version.
        compilable: Rows to choose from: those that the compiler knows.

    Raises:
        KernelError: The GPU is older than all rows; the message lists them.
    """
    rows = sorted(compilable, reverse=True)
    targets = [Target(row) for row in rows] + [Target(row.without_suffix, "ptx") for row in rows]
    chosen = next((target for target in targets if target.runs_on(major, minor)), None)
    if chosen is None:
        raise KernelError(
            f"no kernel runs on a GPU of compute capability {major}.{minor}; they are built for "
            f"{_listed(compilable)}; use a newer GPU, or keep the tensors on the CPU"
        )
    if chosen.architecture.capability != (major, minor):
        logger.warning(
            "a GPU of compute capability %d.%d has no row of its own among %s: compiling %s for it",
            *(major, minor, _listed(compilable), chosen),
        )
    return chosen


def _listed(architectures: Collection[Architecture] = ARCHITECTURES) -> str:
    return ", ".join(map(str, sorted(architectures)))
