"""The operations that compressors call: checked, and run by the build that fits the device.

:mod:`dynamiq.kernels.hadamard.reference` specifies what they give; every build gives the same bits.
CPU tensors use the host build, or the reference where there is no C++ compiler; CUDA tensors use
the kernels of their device.
"""

import torch
from torch import Tensor

from dynamiq.core.errors import InputError
from dynamiq.kernels.builds import Run, check_memory, find_build
from dynamiq.kernels.hadamard import arguments, reference
from dynamiq.kernels.hadamard.operands import (
    LOG_UNIT,
    UNIT,
    Blocks,
    Finish,
    Quantizer,
    passes,
    payload_bytes,
)
from dynamiq.kernels.hadamard.parts import Part, parts_of
from dynamiq.kernels.registry import ENTRY_DTYPES

INTEGERS = (torch.uint8, torch.int16, torch.int32)
"""What sums of integers are held in."""
_MOST_BITS = 31


def energies(entries: Tensor) -> Tensor:
    """Return the energy of every 256 entries of entries[d]: float64[⌈d / 256⌉]."""
    _check_entries(entries, entries.numel())
    if (run := _build(entries.dtype, entries.device)) is None:
        return reference.energies(entries)
    count = -(-entries.numel() // UNIT)
    found = torch.empty(count, dtype=torch.float64, device=entries.device)
    a = arguments.Energies(entries.data_ptr(), entries.numel(), found.data_ptr())
    run("energies", a, count)
    return found


def quantize(entries: Tensor, blocks: Blocks, quantizer: Quantizer, codes: Tensor) -> None:
    """Rotate entries[d] and write their integers to codes[blocks.numel]."""
    _check_entries(entries, blocks.numel)
    _check_blocks(blocks, entries.device)
    _check_codes(codes, entries.device, blocks.numel)
    if (run := _build(entries.dtype, entries.device)) is None:
        reference.quantize(entries, blocks, quantizer, codes)
        return
    work = _scratch(blocks, entries.device)
    for part in parts_of(blocks, entries.device):
        _rotate(run, entries, part, quantizer, (work, codes))


def dequantize(codes: Tensor, blocks: Blocks, finish: Finish, out: Tensor) -> None:
    """Write the result of sums of integers, codes[blocks.numel], to out[d], d at most that."""
    _check_entries(out, blocks.numel)
    _check_blocks(blocks, out.device)
    _check_codes(codes, out.device, blocks.numel)
    if (run := _build(out.dtype, out.device)) is None:
        reference.dequantize(codes, blocks, finish, out)
        return
    work = _scratch(blocks, out.device)
    for part in parts_of(blocks, out.device):
        _rotate_back(run, (work, codes), part, finish, out)
    if not out.is_inference():  # tell autograd, which may hold the entries for a backward
        torch.autograd.graph.increment_version(out)


def pack(codes: Tensor, bits: int, out: Tensor) -> None:
    """Write codes[m] with so many bits each to out: uint8[m · bits / 8]."""
    _check_payload(codes, bits, out)
    if (run := _build(None, codes.device)) is None:
        reference.pack(codes, bits, out)
        return
    integers = arguments.Integers.of(codes)
    a = arguments.Carry(None, integers, out.data_ptr(), 0, bits, adds=1, writes=0)
    run("carry", a, codes.numel() // UNIT)


def unpack(payload: Tensor, bits: int, codes: Tensor, *, add: bool = False) -> None:
    """Replace codes[m] by what a payload says, or add that to them; sums must fit."""
    _check_payload(codes, bits, payload)
    if (run := _build(None, codes.device)) is None:
        values = reference.unpack(payload, bits)
        codes.copy_(codes + values if add else values)
        return
    integers = arguments.Integers.of(codes)
    a = arguments.Carry(payload.data_ptr(), integers, None, bits, 0, adds=add, writes=1)
    run("carry", a, codes.numel() // UNIT)


def repack(payload: Tensor, codes: Tensor, bits: tuple[int, int], out: Tensor) -> None:
    """Write codes[m] + payload to out, with other bits; ``bits`` are those of both payloads."""
    _check_payload(codes, bits[0], payload)
    _check_payload(codes, bits[1], out)
    if (run := _build(None, codes.device)) is None:
        reference.pack(codes + reference.unpack(payload, bits[0]), bits[1], out)
        return
    integers = arguments.Integers.of(codes)
    ends = (payload.data_ptr(), integers, out.data_ptr())
    run("carry", arguments.Carry(*ends, *bits, adds=1, writes=0), codes.numel() // UNIT)


def _scratch(blocks: Blocks, device: torch.device) -> Tensor:
    """Return memory for what lies between passes, of one part."""
    if blocks.log_block == LOG_UNIT:
        return torch.empty(0, device=device)
    first = next(iter(parts_of(blocks, device)), None)  # none is larger
    numel = 0 if first is None else first.numel
    return torch.empty(numel, dtype=torch.float32, device=device)


def _rotate(
    run: Run, entries: Tensor, part: Part, quantizer: Quantizer, memory: tuple[Tensor, Tensor]
) -> None:
    """Rotate whole blocks, passes that reach no further than a piece while it is in the cache."""
    work, codes = memory
    steps = passes(part.blocks.log_block)
    device = entries.device
    for piece in part.pieces:
        values = work[piece.begin - part.begin :]
        b = arguments.Blocks.of(piece.blocks)
        q = arguments.Quantizer.of(quantizer, piece.blocks.first_unit, device)
        here = entries[piece.begin : piece.begin + piece.numel]
        for step in steps[: part.near]:
            target = arguments.Rotated.of(codes[piece.begin :] if step is steps[-1] else values)
            if step is steps[0]:
                a = arguments.Rotate(here.data_ptr(), here.numel(), b, target, q)
                run("rotate", a, piece.units)
            else:
                run(
                    "mix",
                    arguments.Mix(arguments.Rotated.of(values), target, b, q, *step),
                    piece.units,
                )
    b = arguments.Blocks.of(part.blocks)
    q = arguments.Quantizer.of(quantizer, part.blocks.first_unit, device)
    for step in steps[part.near :]:
        target = arguments.Rotated.of(codes[part.begin :] if step is steps[-1] else work)
        run("mix", arguments.Mix(arguments.Rotated.of(work), target, b, q, *step), part.units)


def _rotate_back(
    run: Run, memory: tuple[Tensor, Tensor], part: Part, finish: Finish, out: Tensor
) -> None:
    """Undo that: first the passes that reach further than a piece."""
    work, codes = memory
    steps = passes(part.blocks.log_block)
    b, q = arguments.Blocks.of(part.blocks), arguments.Quantizer()
    integers = arguments.Rotated.of(codes[part.begin :], finish.offset)
    values = arguments.Rotated.of(work)
    for step in reversed(steps[part.near :]):
        source = integers if step is steps[-1] else values
        run("mix", arguments.Mix(source, values, b, q, *step), part.units)
    for piece in part.pieces:
        b = arguments.Blocks.of(piece.blocks)
        integers = arguments.Rotated.of(codes[piece.begin :], finish.offset)
        values = arguments.Rotated.of(work[piece.begin - part.begin :])
        here = out[piece.begin : piece.begin + piece.numel]
        for step in reversed(steps[: part.near]):
            source = integers if step is steps[-1] else values
            if step is steps[0]:
                ends = (here.data_ptr(), here.numel(), finish.divisor, finish.limit)
                run("rotate_back", arguments.RotateBack(source, b, *ends), piece.units)
            else:
                run("mix", arguments.Mix(source, values, b, q, *step), piece.units)


def _build(dtype: torch.dtype | None, device: torch.device) -> Run | None:
    """Return what runs kernels on entries of a dtype, or ``carry``; None for the reference."""
    return find_build("hadamard", dtype, device)


def _check_entries(entries: Tensor, most: int) -> None:
    if entries.device.type not in {"cpu", "cuda"}:
        raise InputError(f"kernels run on cpu and cuda, got entries on {entries.device}")
    check_memory("entries", entries, tuple(ENTRY_DTYPES), entries.device)
    if entries.dim() != 1 or entries.numel() > most:
        raise InputError(
            f"these blocks have {most} flat entries at most, got {list(entries.shape)}"
        )


def _check_blocks(blocks: Blocks, device: torch.device) -> None:
    for name in ("factor", "scale"):
        check_memory(name, getattr(blocks, name), (torch.float32,), device)
    if blocks.factor.shape != blocks.scale.shape or blocks.log_block < 8:
        raise InputError(
            f"blocks of at least 2^8 entries have one factor and one scale each, got "
            f"{list(blocks.factor.shape)} and {list(blocks.scale.shape)} for 2^{blocks.log_block}"
        )


def _check_codes(codes: Tensor, device: torch.device, numel: int) -> None:
    check_memory("integers", codes, INTEGERS, device)
    if codes.shape != (numel,) or codes.data_ptr() % 16:
        raise InputError(
            f"there are {numel} integers at an address that is a multiple of 16, got "
            f"{list(codes.shape)} at {codes.data_ptr():#x}"
        )


def _check_payload(codes: Tensor, bits: int, payload: Tensor) -> None:
    check_memory("a payload", payload, (torch.uint8,), codes.device)
    _check_codes(codes, codes.device, codes.numel() // UNIT * UNIT)
    nbytes = payload_bytes(codes.numel() // UNIT, bits)
    if not 1 <= bits <= _MOST_BITS or payload.shape != (nbytes,) or payload.data_ptr() % 2:
        raise InputError(
            f"{codes.numel()} integers of {bits} bits (1 to {_MOST_BITS}) have a payload of "
            f"{nbytes} bytes at an even address, got {list(payload.shape)} at "
            f"{payload.data_ptr():#x}"
        )
