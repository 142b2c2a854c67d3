"""The machine instructions of a cubin, counted: what a kernel costs, read without a GPU.

NVIDIA's ``nvdisasm`` lists them; its wheel comes with the extra ``gpu``.
"""

import json
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dynamiq.core.errors import KernelError

ENTRIES_PER_THREAD = 16

_CLASSES = {
    "memory": "ATOM ATOMG ATOMS CCTL LD LDC LDCU LDG LDGSTS LDL LDS LDSM RED ST STG STL STS",
    "float": "DADD DFMA DMUL DSETP FADD FADD2 FCHK FFMA FFMA2 FMNMX FMNMX3 FMUL FMUL2 FSEL FSET"
    " FSETP HADD2 HFMA2 HMNMX2 HMUL2 HSETP2 MUFU",
    "conversion": "F2F F2FP F2I F2IP FRND I2F I2FP",
    "integer": "BMSK BREV FLO IABS IADD IADD3 IDP IMAD IMNMX ISETP LEA LOP3 PLOP3 POPC PRMT SEL"
    " SGXT SHF SHL SHR VIADD VIADDMNMX VIMNMX VIMNMX3",
    "shuffle": "MATCH REDUX SHFL VOTE VOTEU",
    "branch": "BAR BRA BREAK BRX BSSY BSYNC CALL EXIT JMP RET WARPSYNC YIELD",
}
_CLASS_OF = {mnemonic: name for name, listed in _CLASSES.items() for mnemonic in listed.split()}
_ACCESS_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        opcode: Mnemonic with modifiers, such as "LDG.E.128".
        operands: What it works on, as nvdisasm writes it.
    """

    opcode: str
    operands: str = ""

    @property
    def mnemonic(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def kind(self) -> str:
        """Its class: memory, float, conversion, integer, shuffle, branch, or other (moves)."""
        # U…: the same instruction for values that all threads of a warp share.
        shared = _CLASS_OF.get(self.mnemonic.removeprefix("U"), "other")
        return _CLASS_OF.get(self.mnemonic, shared)

    @property
    def access_bytes(self) -> int:
        """Bytes that a thread moves, if this is a load or a store; their default is a word."""
        sizes = [_ACCESS_BYTES[part] for part in self.opcode.split(".") if part in _ACCESS_BYTES]
        return sizes[-1] if sizes else 4


@dataclass(frozen=True)
class Listing:
    """The instructions of one kernel.

    All counts are static: each instruction of the code counts once. A thread that takes one side of
    a branch executes fewer, one that repeats a loop executes more. In a build for one width without
    loops over data, the count is close to what a thread that does the whole work executes.
    """

    instructions: tuple[Instruction, ...]

    def count_by_class(self) -> dict[str, int]:
        """Return how many instructions there are of each class."""
        return dict(Counter(instruction.kind for instruction in self.instructions))

    @property
    def per_entry(self) -> float:
        """Instructions per entry of a bucket: the static count over the 16 entries of a thread."""
        return len(self.instructions) / ENTRIES_PER_THREAD

    @property
    def widest_load_bytes(self) -> int:
        """The largest load from global memory, 0 without any; GPUs prefer 16 bytes or more."""
        return max((i.access_bytes for i in self._of("LDG")), default=0)

    @property
    def spill_stores_bytes(self) -> int:
        """Bytes stored to local memory: spilled registers, and local arrays if there are any."""
        return sum(i.access_bytes for i in self._of("STL"))

    @property
    def spill_loads_bytes(self) -> int:
        """Bytes loaded from local memory: spilled registers, and local arrays if there are any."""
        return sum(i.access_bytes for i in self._of("LDL"))

    def _of(self, mnemonic: str) -> list[Instruction]:
        return [i for i in self.instructions if i.mnemonic == mnemonic]


def disassemble(cubin: bytes, kernel: str) -> Listing:
    """Return the instructions of a kernel, without the padding behind them.

    Raises:
        KernelError: nvdisasm is missing or fails, or the cubin holds no such kernel.
    """
    with TemporaryDirectory(prefix="dynamiq-") as folder:
        path = Path(folder) / f"{kernel}.cubin"
        path.write_bytes(cubin)
        command = [_nvdisasm(), "--emit-json", str(path)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise KernelError(f"nvdisasm cannot read the cubin of {kernel}: {run.stderr.strip()}")
    functions = {f["function-name"]: f["sass-instructions"] for f in json.loads(run.stdout)[1]}
    if kernel not in functions:
        raise KernelError(f"the cubin has no kernel {kernel}; it has {', '.join(functions)}")
    found = [Instruction(i["opcode"], i.get("operands", "")) for i in functions[kernel]]
    return Listing(tuple(_without_padding(found)))


def _nvdisasm() -> str:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        found = None
    else:
        found = find_nvidia_binary_utility("nvdisasm")
    if found is None:
        raise KernelError(
            "reading machine instructions needs nvdisasm, which is not installed; run: pip install "
            '"dynamiq-allreduce[gpu]"'
        )
    return str(found)


def _without_padding(instructions: list[Instruction]) -> list[Instruction]:
    """Drop what no thread reaches: a branch to itself behind the last instruction, and no-ops."""
    while instructions and instructions[-1].mnemonic == "NOP":
        instructions.pop()
    if instructions and instructions[-1].mnemonic == "BRA":
        own_address = 16 * (len(instructions) - 1)
        if instructions[-1].operands == hex(own_address):
            instructions.pop()
    return instructions
