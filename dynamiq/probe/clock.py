"""Seconds that named operations take on one rank."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dynamiq.probe.together import Together


@dataclass
class Clock:
    """Notes operations, and how many entries each had.

    Where ranks share cores, an operation either runs undisturbed or is put off for milliseconds:
    the processor time that it takes, times the ranks per core, says more than the time that passed.

    Attributes:
        together: The ranks.
        cores_per_rank: As in :class:`dynamiq.planner.profiles.hardware.Processor`; None on a GPU.
        seconds: Of each operation, by name.
        entries: Of the operations of that name, which are of one size.
    """

    together: Together
    cores_per_rank: float | None
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    entries: dict[str, int] = field(default_factory=dict)

    def now(self) -> float:
        """Return seconds since some moment."""
        self.together.settle()
        if self.cores_per_rank is not None and self.cores_per_rank < 1:
            return time.process_time() / self.cores_per_rank
        return time.perf_counter()

    @contextmanager
    def time(self, name: str, entries: int) -> Iterator[None]:
        """Note how long the block takes."""
        began = self.now()
        yield
        self.seconds[name].append(self.now() - began)
        self.entries[name] = entries
