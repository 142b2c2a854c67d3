"""Each kernel by entry format and width, beside a plain copy of the same entries.

    scripts/test tests/benchmarks/test_kernels.py --benchmark-json kernels.json
    .venv/bin/dynamiq roofline kernels.json

Rounds alternate with copies, so that what slows the machine down slows both down. One thread,
stochastic rounding (MX: to nearest), and 2^24 entries in FP32 at 2, 4 and 8 bits, 2^23 elsewhere;
``--kernel-entries``, ``-threads``, ``-rounding`` and ``-device`` choose otherwise. In the former,
executed instructions are counted, too. Asserts nothing about time.
"""

import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import pytest
import torch

from dynamiq.kernels import host
from dynamiq.kernels.registry import WIDTHS
from dynamiq.roofline.case import Case
from dynamiq.roofline.families import COPY, FAMILIES, traffic
from dynamiq.roofline.traffic import UNIT
from tests.benchmarks import of_hadamard, of_mx, of_supergroups
from tests.benchmarks.prepared import FORMATS, Prepared, entries_like_gradients
from tests.benchmarks.stepping import executed_per_item
from tests.kernels.devices import on

MODULES = {"supergroups": of_supergroups, "mx": of_mx, "hadamard": of_hadamard}
MANY, FEW = 1 << 24, 1 << 23
ROUNDS = 9
COUNTED, COUNTED_OF_MIX = 4, 64
"""Units whose instructions are counted, a second or two; mix does 64 columns together."""
CALLS_PER_ROUND = {"cpu": 1, "cuda": 20}  # a launch costs as much as a short kernel


@dataclass(frozen=True)
class Benchmark:
    """One row of the report; a copy belongs to the family of kernels that it is held against."""

    family: str
    case: Case
    rounding: str | None = None

    def __str__(self) -> str:
        c = self.case
        bits = None if c.width is None else f"{c.width}-bits"
        operands = c.operands and c.operands.replace(" ", "-")
        family = self.family if self.family != "supergroups" and c.kernel != COPY else None
        parts = (family, c.kernel, c.format, bits, operands, self.rounding)
        return "-".join(filter(None, parts))


def benchmarks(asked: list[str] | None) -> list[Benchmark]:
    """Return all rows: with the roundings that were asked for, else with each family's default."""
    rows = [Benchmark("supergroups", Case(COPY, f)) for f in FORMATS]
    for name, family in FAMILIES.items():
        module = MODULES[name]
        for case in family.cases(tuple(FORMATS), WIDTHS):
            rows += [
                Benchmark(name, case, rounding) for rounding in _roundings(module, case, asked)
            ]
    if not asked:
        case = Case("decompress_accumulate_recompress", "FP32", 4)
        rows.append(Benchmark("supergroups", case, "correlated"))
    return rows


def _roundings(module: ModuleType, case: Case, asked: list[str] | None) -> list[str | None]:
    if case.kernel not in module.ROUNDING:
        return [None]
    return [r for r in asked if r in module.ROUNDINGS] if asked else [module.DEFAULT]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    rows = benchmarks(metafunc.config.getoption("kernel_rounding"))
    metafunc.parametrize("row", rows, ids=str)


@cache
def build(family: str, entry_format: str | None, device: str) -> str:
    """Return what was compiled, and by what."""
    if device != "cpu":
        return f"NVRTC, {torch.cuda.get_device_name(device)}"
    if host.library(family, entry_format) is None:
        return "torch, the reference"
    command = [*host.find_compiler(), "--version"]
    version = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return f"host, {version.splitlines()[0]}"


def prepared(row: Benchmark, numel: int, device: str) -> Prepared:
    """Return the row's call."""
    case = row.case
    if case.kernel != COPY:
        return MODULES[row.family].prepare(case, row.rounding, numel, device)
    x = on(device, entries_like_gradients(numel, FORMATS[case.format]))
    out = torch.empty_like(x)
    return Prepared(lambda: out.copy_(x), x, (x,), (out,))


def instructions(function: Callable[[], object], some: int) -> float | None:
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
    counted = executed_per_item(works[0], some)
    return counted and counted / UNIT


def timed(function: Callable[[], object], device: str, calls: int) -> float:
    """Return the seconds that so many calls take."""
    began = time.perf_counter()
    for _ in range(calls):
        function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def test_kernel(benchmark, request: pytest.FixtureRequest, row: Benchmark) -> None:
    asked, case = request.config.getoption, row.case
    device, threads, numel = (asked(f"kernel_{name}") for name in ("device", "threads", "entries"))
    if device != "cpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")
    principal = case.format in ("FP32", None) and case.width in (None, 2, 4, 8)
    numel = numel or (MANY if principal else FEW)
    calls = CALLS_PER_ROUND[torch.device(device).type]
    torch.set_num_threads(threads)
    try:
        call = prepared(row, numel, device)
        function, out = call.run, torch.empty_like(call.entries)
        if principal and device == "cpu":
            counted = instructions(function, COUNTED_OF_MIX if case.kernel == "mix" else COUNTED)
            benchmark.extra_info["instructions_per_entry"] = counted
        copies: list[float] = []
        benchmark.pedantic(
            timed,
            args=(function, device, calls),
            setup=lambda: copies.append(timed(lambda: out.copy_(call.entries), device, calls)),
            rounds=ROUNDS,
            warmup_rounds=1,
        )
    finally:
        torch.set_num_threads(1)
    moved = traffic(case, numel // UNIT)
    benchmark.extra_info.update(
        kernel=case.kernel,
        format=case.format,
        width=case.width,
        operands=case.operands,
        rounding=row.rounding,
        entries=numel,
        read_bytes=moved.read_bytes,
        written_bytes=moved.written_bytes,
        calls=calls,
        copy_s=statistics.median(copies[1:]),
        threads=threads,
        build=build(row.family, case.format, device),
        device=torch.cuda.get_device_name(device) if device != "cpu" else cpu_model(),
    )


@cache
def cpu_model() -> str:
    """Return what the CPU calls itself."""
    from cpuinfo import get_cpu_info

    return str(get_cpu_info().get("brand_raw", "unknown CPU"))
