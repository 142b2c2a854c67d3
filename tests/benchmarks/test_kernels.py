"""Each kernel by entry format and width, beside a plain copy of the same entries.

    scripts/test tests/benchmarks/test_kernels.py --benchmark-json kernels.json
    .venv/bin/dynamiq roofline kernels.json

Rounds alternate with copies, so that what slows the machine down slows both down. One thread,
stochastic rounding, and 2^24 entries in FP32 at 2, 4 and 8 bits, 2^23 elsewhere;
``--kernel-entries``, ``-threads``, ``-rounding`` and ``-device`` choose otherwise. In the former,
executed instructions are counted, too. Asserts nothing about time.
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from dynamiq.core.layout import Layout
from dynamiq.kernels import host
from dynamiq.kernels.registry import ENTRY_DTYPES, WIDTHS, kernels_of
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.wire import GROUP, SUPERGROUP, TILE, Address, Rounding
from dynamiq.roofline.traffic import COPY, traffic
from tests.benchmarks.stepping import executed_per_item
from tests.kernels.devices import on
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call

FORMATS = {name: dtype for dtype, name in ENTRY_DTYPES.items()}
MANY, FEW = 1 << 24, 1 << 23
ROUNDS = 9
COUNTED = 4
"""Supergroups whose instructions are counted: a second or two."""
CALLS_PER_ROUND = {"cpu": 1, "cuda": 20}  # a launch costs as much as a short kernel
RANKS = 4
ROUNDED = ("compress", "decompress_accumulate_recompress")


@dataclass(frozen=True)
class Case:
    """One row of the report."""

    kernel: str
    entry_format: str
    width: int | None = None
    rounding: Rounding | None = None

    def __str__(self) -> str:
        bits = None if self.width is None else f"{self.width}-bits"
        return "-".join(filter(None, (self.kernel, self.entry_format, bits, self.rounding)))


def cases(roundings: list[Rounding] | None) -> list[Case]:
    """Return all rows; with ``roundings`` each of those, else stochastic and one correlated."""
    rows = [Case(COPY, f) for f in FORMATS]
    for spec in kernels_of("supergroups"):
        for entry_format in FORMATS:
            for rounding in (roundings or ["stochastic"]) if spec.name in ROUNDED else [None]:
                widths = WIDTHS if spec.has_widths else [None]
                rows += [Case(spec.name, entry_format, width, rounding) for width in widths]
    if not roundings:
        rows.append(Case("decompress_accumulate_recompress", "FP32", 4, "correlated"))
    return rows


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rows = cases(metafunc.config.getoption("kernel_rounding"))
    metafunc.parametrize("case", rows, ids=str)


@cache
def build(entry_format: str, device: str) -> str:
    """Return what was compiled, and by what."""
    if device != "cpu":
        return f"NVRTC, {torch.cuda.get_device_name(device)}"
    if host.library("supergroups", entry_format) is None:
        return "torch, the reference"
    command = [*host.find_compiler(), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"host, {version.splitlines()[0]}"


@cache
def entries_like_gradients(numel: int, dtype: torch.dtype) -> Tensor:
    """Return entries of which groups, and supergroups, have scales of their own."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(numel, generator=generator)
    for size, spread in ((GROUP, 1.0), (SUPERGROUP, 2.0)):
        scales = torch.exp(spread * torch.randn(numel // size, generator=generator))
        x *= scales.repeat_interleave(size)
    return x.to(dtype)


def call_of(case: Case, numel: int, device: str) -> Call:
    x = entries_like_gradients(numel, FORMATS[case.entry_format])
    layout = Layout(numel, 1, SUPERGROUP)
    quantizer = operations.quantizer((case.width or 4,), case.rounding or "stochastic")
    address = Address(seed=1, call=2, hop=0, sender=1, world_size=RANKS)
    tiles = -(-layout.positions // TILE)
    call = Call.of(x, layout, quantizer, address, tile_count=tiles, mixed=False)
    return on(device, call)


def operation(case: Case, c: Call) -> Callable[[], object]:
    """Return the kernel's call, with all of its memory."""
    out, sums = c.result.bucket.entries, on(out_device(c), c.sums())
    payload, recompressed = (on(out_device(c), c.payload()) for _ in range(2))
    ops.compress(c.values, c.tiles, c.quantizer, payload)
    tiles, q, both = c.tiles, c.quantizer, (c.tiles, c.tiles)
    stored = type(c.values)(c.values.bucket, c.values.factor, c.values.shift, sums)
    return {
        COPY: lambda: out.copy_(c.values.bucket.entries),
        "statistics": lambda: ops.statistics(c.values.bucket, RANKS),
        "compress": lambda: ops.compress(c.values, tiles, q, payload),
        "decompress": lambda: ops.decompress(payload, c.result, tiles, q),
        "decompress_accumulate": lambda: ops.decompress_accumulate(
            payload, c.values, sums, tiles, q
        ),
        "decompress_accumulate_recompress": lambda: ops.decompress_accumulate_recompress(
            payload, c.values, both, q, recompressed
        ),
        "store": lambda: ops.store(stored, tiles.units, c.result),
    }[case.kernel]


def instructions(function: Callable[[], object]) -> float | None:
    """Return the host kernel's instructions per entry; None where no host kernel runs."""
    works: list[Callable[[int, int], None]] = []

    def listen(work: Callable[[int, int], None], count: int) -> None:
        works.append(work)
        work(0, count)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "in_parts", listen)
        function()
    if not works:
        return None
    counted = executed_per_item(works[0], COUNTED)
    return counted and counted / SUPERGROUP


def out_device(c: Call) -> torch.device:
    return c.result.bucket.entries.device


def timed(function: Callable[[], object], device: str, calls: int) -> float:
    """Return the seconds that so many calls take."""
    began = time.perf_counter()
    for _ in range(calls):
        function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def test_kernel(benchmark, request: pytest.FixtureRequest, case: Case) -> None:
    asked = request.config.getoption
    device, threads, numel = (asked(f"kernel_{name}") for name in ("device", "threads", "entries"))
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    principal = case.entry_format == "FP32" and case.width in (None, 2, 4, 8)
    numel = numel or (MANY if principal else FEW)
    calls = CALLS_PER_ROUND[torch.device(device).type]
    torch.set_num_threads(threads)
    try:
        c = call_of(case, numel, device)
        function, copy = operation(case, c), operation(Case(COPY, case.entry_format), c)
        if principal and device == "cpu":
            benchmark.extra_info["instructions_per_entry"] = instructions(function)
        copies: list[float] = []
        benchmark.pedantic(
            timed,
            args=(function, device, calls),
            setup=lambda: copies.append(timed(copy, device, calls)),
            rounds=ROUNDS,
            warmup_rounds=1,
        )
    finally:
        torch.set_num_threads(1)
    moved = traffic(case.kernel, case.entry_format, case.width, numel // SUPERGROUP)
    benchmark.extra_info.update(
        kernel=case.kernel,
        format=case.entry_format,
        width=case.width,
        rounding=case.rounding,
        entries=numel,
        read_bytes=moved.read_bytes,
        written_bytes=moved.written_bytes,
        calls=calls,
        copy_s=statistics.median(copies[1:]),
        threads=threads,
        build=build(case.entry_format, device),
        device=torch.cuda.get_device_name(device) if device != "cpu" else cpu_model(),
    )


@cache
def cpu_model() -> str:
    """Return what the CPU calls itself."""
    from cpuinfo import get_cpu_info

    return str(get_cpu_info().get("brand_raw", "unknown CPU"))
