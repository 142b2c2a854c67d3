"""Rows for a GPU that is not here: machine code is compiled and counted, the rest is arithmetic."""

from dynamiq.kernels.architecture import Target
from dynamiq.kernels.nvrtc import compile_kernel
from dynamiq.kernels.registry import find_architecture, find_kernel
from dynamiq.kernels.sass import disassemble
from dynamiq.kernels.supergroups.wire import SUPERGROUP, TILE
from dynamiq.roofline.machine import Machine
from dynamiq.roofline.row import Row
from dynamiq.roofline.traffic import traffic


def predict(machine: Machine, kernel: str, entry_format: str, width: int | None) -> Row:
    """Return what a kernel can reach on a machine at most, by its datasheet.

    The count of instructions is static: code for one width, in which every instruction counts
    once, those of all roundings included. So the bound by instructions is a rough one.

    Args:
        machine: The GPU.
        kernel: A kernel of the family ``supergroups``.
        entry_format: How entries are stored.
        width: Bits of a code; of no account for kernels without widths.

    Raises:
        KernelError: The kernel cannot be compiled, or its code cannot be read.
    """
    spec = find_kernel(kernel)
    width = width if spec.has_widths else None
    target = Target(find_architecture(machine.architecture))
    compiled = compile_kernel(spec, entry_format, target, only_width=width)
    instructions = disassemble(compiled.code, kernel).per_entry
    moved = traffic(kernel, entry_format, width, TILE).moved_bytes / (TILE * SUPERGROUP)
    return Row(
        kernel=kernel,
        format=entry_format,
        width=width,
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
    )
