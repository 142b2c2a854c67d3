"""What a machine can do at most, and what follows from that for a kernel that was never run on it.

A prediction is the tighter of two bounds: bytes over the memory's bandwidth, and instructions over
the rate at which the cores can start them. No run reaches both.
"""

from dataclasses import dataclass

_LANES = 32


@dataclass(frozen=True)
class Machine:
    """A GPU by its datasheet.

    Attributes:
        name: What to ask for.
        architecture: What kernels are compiled for.
        memory_bytes_per_s: Bandwidth of its memory.
        multiprocessors: How many.
        clock_hz: Boost clock.
        issued_per_clock: Instructions that a multiprocessor starts per clock, each for 32 threads.
        source: Where the numbers are from.
    """

    name: str
    architecture: str
    memory_bytes_per_s: float
    multiprocessors: int
    clock_hz: float
    issued_per_clock: int
    source: str

    @property
    def instructions_per_s(self) -> float:
        """Instructions of single threads that all multiprocessors start together."""
        return self.multiprocessors * self.issued_per_clock * _LANES * self.clock_hz

    def entries_per_s(self, bytes_per_entry: float, instructions_per_entry: float) -> float:
        """Return the tighter bound."""
        by_memory = self.memory_bytes_per_s / bytes_per_entry
        return min(by_memory, self.instructions_per_s / instructions_per_entry)


H200 = Machine(
    name="H200",
    architecture="sm_90a",
    memory_bytes_per_s=4.8e12,
    multiprocessors=132,
    clock_hz=1.98e9,
    issued_per_clock=4,
    source="NVIDIA H200 datasheet: 4.8 TB/s, 67 TFLOPS in FP32 = 132 SMs x 128 lanes x 2 x "
    "1.98 GHz; NVIDIA Hopper whitepaper: four schedulers per SM, each one instruction per clock",
)
MACHINES = {machine.name: machine for machine in (H200,)}
