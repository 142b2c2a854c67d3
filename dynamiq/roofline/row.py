"""One line of the report: a kernel on a machine, measured or predicted."""

from dataclasses import dataclass
from typing import Any, Literal

MEMORY_BOUND = 0.8
"""From this share of a copy's bandwidth on, what binds is called memory."""


@dataclass(frozen=True)
class Row:
    """A kernel by entry format and width.

    Attributes:
        kernel: Its name, or "copy".
        format: How entries are stored; None for kernels that read none.
        width: Bits of a code; None for kernels without widths.
        rounding: Of entries; None where nothing is rounded, or for code that holds all roundings.
        machine: The processor's name.
        build: What was compiled and by what.
        predicted: Whether this was computed from the machine's datasheet; else it was measured.
        threads: Of the host; None on a GPU.
        entries: Of one call; None if predicted.
        entries_per_s: How many were worked on per second.
        bytes_per_entry: Read and written, counted from the operands.
        copy_bytes_per_s: Bandwidth of a plain copy of the same entries in the same run; if
            predicted, that of the datasheet.
        instructions_per_entry: Measured on a host: executed ones, of which a vector instruction
            counts once. Predicted: all of a thread's machine code. None if nobody counted.
        operands: What else decides how much is moved, such as "mxfp4_e2m1"; None if nothing does.
    """

    kernel: str
    format: str | None
    width: int | None
    rounding: str | None
    machine: str
    build: str
    predicted: bool
    threads: int | None
    entries: int | None
    entries_per_s: float
    bytes_per_entry: float
    copy_bytes_per_s: float
    instructions_per_entry: float | None
    operands: str | None = None

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth reached."""
        return self.entries_per_s * self.bytes_per_entry

    @property
    def share_of_copy(self) -> float:
        """The bandwidth reached over that of a plain copy."""
        return self.bytes_per_s / self.copy_bytes_per_s

    @property
    def instructions_per_byte(self) -> float | None:
        """The arithmetic intensity; None if nobody counted."""
        counted = self.instructions_per_entry
        return None if counted is None else counted / self.bytes_per_entry

    @property
    def binds(self) -> Literal["memory", "compute"]:
        """What keeps the kernel from being faster: memory, if it is nearly as quick as a copy."""
        return "memory" if self.share_of_copy >= MEMORY_BOUND else "compute"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and what follows from them, for JSON."""
        derived = ("bytes_per_s", "share_of_copy", "instructions_per_byte", "binds")
        return {**vars(self), **{name: getattr(self, name) for name in derived}}
