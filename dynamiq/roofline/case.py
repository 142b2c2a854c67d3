"""What a row of the report is of: one kernel, and what it is given."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A kernel on operands of one kind.

    Attributes:
        kernel: Its name, or "copy".
        format: How entries are stored; None for kernels that read none.
        width: Bits of a code, for kernels that can be built for one width.
        operands: What else decides how much is moved, in its family's words, such as
            "mxfp4_e2m1"; None where nothing does.
    """

    kernel: str
    format: str | None
    width: int | None = None
    operands: str | None = None
