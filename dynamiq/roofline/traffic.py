"""The bytes that an operation must read and write, counted from its operands.

Each operand counts once: entries in their dtype, payloads, sums, and the tables that grow with
them. What a call reads once whatever its size is left out: slices, the quantiser's tables. So this
is the least that any implementation moves between memory and cores.
"""

from dataclasses import dataclass

ENTRY_BYTES = {"FP32": 4, "BF16": 2, "FP16": 2}
"""Bytes of an entry, by entry format."""
UNIT = 256
"""Entries that a team of threads works on, in all families."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one call."""

    read_bytes: int
    written_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Both together."""
        return self.read_bytes + self.written_bytes
