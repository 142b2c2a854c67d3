"""Calls of THC's kernels, each on all entries at once; see dynamiq/roofline/hadamard.py."""

import ctypes

import torch

from dynamiq.kernels.builds import find_build
from dynamiq.kernels.hadamard import arguments, ops
from dynamiq.kernels.hadamard.operands import UNIT, Blocks, Quantizer, passes, payload_bytes
from dynamiq.roofline import hadamard as rows
from dynamiq.roofline.case import Case
from tests.benchmarks.prepared import FORMATS, Prepared, entries_like_gradients
from tests.kernels.devices import on

ROUNDINGS = ()
DEFAULT = None
ROUNDING = ()
LOG_BLOCK = 16
"""Blocks of the usual size, 2^20 and more, take the same two passes, and further ones."""


def prepare(case: Case, rounding: str | None, numel: int, device: str) -> Prepared:
    """Return a kernel's call on blocks of 2^16 entries, or on as few as there are."""
    entries = on(device, entries_like_gradients(numel, FORMATS[case.format or "FP32"]))
    codes = torch.randint(rows.TOP, (numel,), device=device).to(rows.INTEGERS)
    if case.kernel == "carry":
        return _carried(case, entries, codes)
    return _rotated(case, entries, codes)


def _carried(case: Case, entries: torch.Tensor, codes: torch.Tensor) -> Prepared:
    own, two, three, most = (
        torch.zeros(payload_bytes(len(codes) // UNIT, bits), dtype=torch.uint8, device=codes.device)
        for bits in rows.BITS
    )
    bits = rows.BITS
    run, read, written = {
        rows.PACK: (lambda: ops.pack(codes, bits[0], own), (codes,), (own,)),
        rows.ADD: (lambda: ops.unpack(own, bits[0], codes, add=True), (own, codes), (codes,)),
        rows.REPACK: (lambda: ops.repack(two, codes, bits[1:3], three), (two, codes), (three,)),
        rows.UNPACK: (lambda: ops.unpack(most, bits[3], codes), (most,), (codes,)),
    }[case.operands]
    return Prepared(run, entries, read, written)


def _rotated(case: Case, entries: torch.Tensor, codes: torch.Tensor) -> Prepared:
    device = entries.device
    values, mixed = (torch.zeros(len(entries), device=device) for _ in range(2))
    factor = torch.ones(len(entries) >> LOG_BLOCK, device=device)
    blocks = Blocks(LOG_BLOCK, 0, 1, factor, factor / 256)
    b = arguments.Blocks.of(blocks)
    q = arguments.Quantizer.of(Quantizer(1, rows.TOP), 0, device)
    step = passes(LOG_BLOCK)[1]
    of = arguments.Rotated.of

    def mix(source: torch.Tensor, target: torch.Tensor) -> tuple[object, ...]:
        structure = arguments.Mix(of(source), of(target), b, q, *step)
        return structure, (source,), (target,)

    energies = torch.zeros(len(entries) // UNIT, dtype=torch.float64, device=device)
    structure, read, written = {
        ("energies", None): (
            arguments.Energies(entries.data_ptr(), len(entries), energies.data_ptr()),
            (entries,),
            (energies,),
        ),
        ("rotate", None): (
            arguments.Rotate(entries.data_ptr(), len(entries), b, of(values), q),
            (entries,),
            (values,),
        ),
        ("mix", rows.FLOATS): mix(values, mixed),
        ("mix", rows.ROUND): mix(values, codes),
        ("mix", rows.CENTRE): mix(codes, values),
        ("rotate_back", None): (
            arguments.RotateBack(
                of(values), b, entries.data_ptr(), len(entries), 1.0, float("inf")
            ),
            (values,),
            (entries,),
        ),
    }[case.kernel, case.operands]
    launch = find_build("hadamard", entries.dtype, device)
    assert launch, "there is no reference of a single pass"
    held = (blocks, values, mixed, codes, energies)  # the structure has their addresses only

    def run(structure: ctypes.Structure = structure, held: object = held) -> None:
        launch(case.kernel, structure, len(entries) // UNIT)

    return Prepared(run, entries, read, written)
