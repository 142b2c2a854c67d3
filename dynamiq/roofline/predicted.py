"""Rows for a GPU that is not here: machine code is compiled and counted, the rest is arithmetic."""

from functools import cache

from dynamiq.kernels.architecture import Target
from dynamiq.kernels.nvrtc import compile_kernel
from dynamiq.kernels.registry import find_architecture, find_kernel
from dynamiq.kernels.sass import disassemble
from dynamiq.kernels.supergroups.wire import TILE
from dynamiq.roofline.case import Case
from dynamiq.roofline.families import traffic
from dynamiq.roofline.machine import Machine
from dynamiq.roofline.row import Row
from dynamiq.roofline.traffic import UNIT


def predict(machine: Machine, case: Case) -> Row:
    """Return what a kernel can reach on a machine at most, by its datasheet.

    The count of instructions is static: code for one width, in which every instruction counts
    once, those of all roundings, and of all kinds of operands, included. So the bound by
    instructions is a rough one.

    Raises:
        KernelError: The kernel cannot be compiled, or its code cannot be read.
    """
    target = Target(find_architecture(machine.architecture))
    instructions = _instructions(case.kernel, case.format, case.width, target)
    # A whole tile, for the tables that go with tiles.
    moved = traffic(case, TILE).moved_bytes / (TILE * UNIT)
    return Row(
        kernel=case.kernel,
        format=case.format,
        width=case.width,
        rounding=None,
        machine=machine.name,
        build=f"NVRTC, {target}",
        predicted=True,
        threads=None,
        entries=None,
        entries_per_s=machine.entries_per_s(moved, instructions),
        bytes_per_entry=moved,
        copy_bytes_per_s=machine.memory_bytes_per_s,
        instructions_per_entry=instructions,
        operands=case.operands,
    )


@cache
def _instructions(
    kernel: str, entry_format: str | None, width: int | None, target: Target
) -> float:
    """Return a thread's instructions per entry: one code serves all kinds of operands."""
    compiled = compile_kernel(find_kernel(kernel), entry_format, target, only_width=width)
    return disassemble(compiled.code, kernel).per_entry
