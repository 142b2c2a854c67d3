"""Which families of kernels have rows, and where each says what its kernels move.

The family ``allocation`` has none: its kernel searches for a price in lists whose lengths follow
from the energies of a bucket, so that no number of bytes per entry holds for it.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from dynamiq.core.errors import KernelError
from dynamiq.kernels.registry import find_kernel
from dynamiq.roofline import hadamard, mx, supergroups
from dynamiq.roofline.case import Case
from dynamiq.roofline.traffic import ENTRY_BYTES, UNIT, Traffic

COPY = "copy"
"""The name of a plain copy of the entries, what everything else is held against."""


class Family(Protocol):
    """What a module says of its family."""

    def cases(self, formats: Sequence[str], widths: Sequence[int]) -> Iterator[Case]:
        """Yield what there are rows of, for those of the formats that a kernel is written for."""

    def traffic(self, case: Case, units: int) -> Traffic:
        """Return what one call on so many units of 256 entries moves."""


FAMILIES: dict[str, Family] = {"supergroups": supergroups, "mx": mx, "hadamard": hadamard}
"""Name of the folder of sources → what its kernels move."""


def traffic(case: Case, units: int) -> Traffic:
    """Return what one call on so many full units of 256 entries moves.

    Raises:
        KernelError: There is no such kernel, or none with a number of bytes per entry.
        KeyError: The kernel has no such entry format or operands.
    """
    if case.kernel == COPY:
        entries = units * UNIT * ENTRY_BYTES[case.format or ""]
        return Traffic(entries, entries)
    family = find_kernel(case.kernel).family
    if family not in FAMILIES:
        raise KernelError(
            f"the kernel {case.kernel} moves no fixed number of bytes per entry; those of "
            f"{', '.join(FAMILIES)} do"
        )
    return FAMILIES[family].traffic(case, units)
