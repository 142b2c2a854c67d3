"""How many entries a second the kernels compress, beside torchao's MX cast and a plain copy.

    .venv/bin/pip install -c constraints.txt -e ".[bench]"
    OMP_NUM_THREADS=1 .venv/bin/python -m evaluation.kernels --recipe local --output kernels.json

Everything works on the same number of FP32 entries and takes turns, round after round, so that a
busy machine slows all down alike; each figure is a median, each ratio a median of ratios within
rounds. "fused" is decompress, accumulate, recompress. A rank of an 8-rank all-reduce computes
statistics of everything, compresses an eighth, runs the fused kernel on seven eighths, and
decompresses everything: "all-reduce" is the sum of these shares of the times. The MX cast to FP4
has as many bits as DynamiQ here; the one to FP8 has twice as many. ``--peer mxfp8_e4m3`` adds the
steps of that format, whose codes and scales are those of torchao's cast. THC rotates all entries,
and all sums back, "load" and "store", in passes of 2^8, 2^8, 2^4, 2^4, ... points. Where "cores"
says that
others used the processor, too, ``chrt -f 1`` before the command overrules them.
"""

import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from dynamiq import (
    Call,
    Compressor,
    DynamiQCompressor,
    Layout,
    Message,
    MXCompressor,
    Ring,
    State,
    THCCompressor,
)
from evaluation.report import environment

Operation = Callable[[], object]

MX_BLOCK = 32
RANKS = 2  # one chunk of two is compressed; the ranks that correlated rounding pairs
COPY, STATISTICS, COMPRESS = "copy", "statistics", "compress"
FUSED, DECOMPRESS = "fused", "decompress"
LOAD, STORE = "load", "store"
WORLD_SIZE = 8  # of the all-reduce
SHARES = {
    STATISTICS: 1.0,
    COMPRESS: 1 / WORLD_SIZE,
    FUSED: (WORLD_SIZE - 1) / WORLD_SIZE,
    DECOMPRESS: 1.0,
}
"""What a rank does in an all-reduce, as shares of its entries."""
Recipe = Literal["paper", "paper-correlated", "local", "rotated", "thc"]
RECIPES: dict[Recipe, Callable[[int], Compressor]] = {
    "paper": lambda bits: DynamiQCompressor.paper(17.0, widths=(bits,), rounding="stochastic"),
    "paper-correlated": lambda bits: DynamiQCompressor.paper(17.0, widths=(bits,)),
    "local": lambda bits: DynamiQCompressor.local(17.0, widths=(bits,)),
    "rotated": lambda bits: DynamiQCompressor.rotated(17.0, widths=(bits,)),
    "thc": THCCompressor.uniform,
}
MX_FP4, MX_FP8 = "to_mx, FP4", "to_mx, FP8"
CAST_OF = {"mxfp8_e4m3": MX_FP8, "mxfp4_e2m1": MX_FP4}
"""The cast of torchao that gives the same codes and scales as a peer format's compression."""


@dataclass(frozen=True)
class Row:
    """What one operation did on one number of threads.

    Attributes:
        operation: Its name.
        threads: Of its own.
        entries_per_s: Median over the rounds.
        cores: CPU time over wall-clock time, median; less than ``threads`` on a busy machine.
        share_of_copy: Its entries/s over those of the copy on one thread; median over the rounds.
    """

    operation: str
    threads: int
    entries_per_s: float
    cores: float
    share_of_copy: float


@dataclass
class Times:
    """Seconds of one operation, by round: by the clock, and of all cores together."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def take(self, operation: Operation) -> None:
        """Run an operation once."""
        cpu, wall = time.process_time(), time.perf_counter()
        operation()
        self.wall_s.append(time.perf_counter() - wall)
        self.cpu_s.append(time.process_time() - cpu)

    def ratio(self, other: "Times") -> float:
        """Return how many times as long the other took: the median over the rounds."""
        return statistics.median(b / a for a, b in zip(self.wall_s, other.wall_s, strict=True))


@dataclass(frozen=True)
class Claim:
    """A ratio, and the least that is asked of it."""

    what: str
    ratio: float
    least: float

    @property
    def holds(self) -> bool:
        """Whether it is reached."""
        return self.ratio >= self.least


def operations(
    x: Tensor, compressor: Compressor, peers: Sequence[str] = ()
) -> dict[str, Operation]:
    """Return what is timed on x[d], by name; each has its memory and has run once."""
    copied = torch.empty_like(x)
    chosen: dict[str, Operation] = {COPY: lambda: copied.copy_(x), **hop(x, compressor)}
    alone = Layout(x.numel(), 1, compressor.unit(x.numel(), 1))
    call = Call(divisor=RANKS)
    chosen[STATISTICS] = lambda: compressor.statistics(x, alone, call, State())
    for peer in peers:
        steps = hop(x, MXCompressor.model_validate({"format": peer}))
        chosen |= {f"{peer} {name}": operation for name, operation in steps.items()}
    if isinstance(compressor, THCCompressor):
        chosen |= rotations(x, compressor)
    chosen |= mx_casts(x)
    for operation in chosen.values():
        operation()
    return chosen


def hop(x: Tensor, compressor: Compressor) -> dict[str, Operation]:
    """Return what a rank does to x[d] at a hop: compression, the fused step, decompression."""
    bucket = x.repeat(RANKS)
    layout = Layout(bucket.numel(), RANKS, compressor.unit(bucket.numel(), RANKS))
    call, schedule = Call(divisor=RANKS), Ring().schedule(RANKS)
    own = compressor.statistics(bucket, layout, call, State())
    reduced = None if own is None else own.values
    if own is not None and own.reduction == "sum":
        reduced = RANKS * own.values
    encoding = compressor.encode(reduced, layout, schedule, call, State())
    work = encoding.load(bucket, 1, torch.empty_like(bucket))
    # Rank 1's part of a ring of two: what rank 0 sends of chunk 1, and what goes round after that.
    incoming, outgoing = Message(1, 0, 1, 0), schedule.gather_message(1)
    everything = range(encoding.positions)
    payload, recompressed = (
        torch.empty(encoding.payload_bytes(m, everything), dtype=torch.uint8)
        for m in (incoming, outgoing)
    )
    encoding.compress(work, incoming, everything, payload)
    return {
        COMPRESS: lambda: encoding.compress(work, incoming, everything, payload),
        FUSED: lambda: encoding.decompress_accumulate_recompress(
            payload, work, incoming, outgoing, everything, recompressed
        ),
        DECOMPRESS: lambda: encoding.decompress(recompressed, work, outgoing, everything),
    }


def rotations(x: Tensor, compressor: THCCompressor) -> dict[str, Operation]:
    """Return what turns x[d], d a power of two, into integers, and what turns their sums back."""
    call, schedule = Call(divisor=RANKS), Ring().schedule(RANKS)
    layout = Layout(x.numel(), 1)
    norms = compressor.statistics(x, layout, call, State()).values
    encoding = compressor.encode(norms, layout, schedule, call, State())
    out = torch.empty_like(x)
    work = encoding.load(x, 0, out)
    return {
        LOAD: lambda: encoding.load(x, 0, out),
        STORE: lambda: encoding.store(work, out),
    }


def mx_casts(x: Tensor) -> dict[str, Operation]:
    """Return torchao's casts of x[d] to blocks with a shared power of two; {} without torchao."""
    # At import, torchao tells of libraries for other GPUs and Pythons that it did not load.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        try:
            from torchao.prototype.mx_formats.mx_tensor import to_mx
        except ImportError:
            return {}
    formats = {MX_FP4: torch.float4_e2m1fn_x2, MX_FP8: torch.float8_e4m3fn}
    return {
        name: lambda element=element: to_mx(x, element, MX_BLOCK)  # type: ignore[misc]
        for name, element in formats.items()
    }


def measure(chosen: dict[str, Operation], pairs: int, threads: int) -> dict[tuple[str, int], Times]:
    """Return the times of all operations, by name and threads; copy and casts use one.

    A round runs everything once, on one thread and what is ours also on ``threads``; every other
    round backwards, since what came before leaves caches warm or cold.
    """
    ours = [1, threads] if threads > 1 else [1]
    turns = [(name, n) for name in chosen for n in (ours if name in (COMPRESS, FUSED) else [1])]
    times = {turn: Times() for turn in turns}
    before = torch.get_num_threads()
    try:
        rounds = track(range(pairs), "measuring", console=Console(stderr=True), transient=True)
        for number in rounds:
            for name, count in turns if number % 2 == 0 else reversed(turns):
                torch.set_num_threads(count)
                times[name, count].take(chosen[name])
    finally:
        torch.set_num_threads(before)
    return times


def rows_of(times: dict[tuple[str, int], Times], entries: int) -> list[Row]:
    """Return the table."""
    rows = []
    for (name, threads), taken in times.items():
        cores = statistics.median(c / w for c, w in zip(taken.cpu_s, taken.wall_s, strict=True))
        rate = entries / statistics.median(taken.wall_s)
        rows.append(Row(name, threads, rate, cores, taken.ratio(times[COPY, 1])))
    return rows


def claims_of(times: dict[tuple[str, int], Times], entries: int = 1) -> list[Claim]:
    """Return what is claimed of these operations; without torchao, or a second thread, less."""
    one = {name: taken for (name, threads), taken in times.items() if threads == 1}
    claims = [
        Claim(f"{COMPRESS} / {COPY}", one[COMPRESS].ratio(one[COPY]), 0.20),
        Claim(f"{FUSED} / {COPY}", one[FUSED].ratio(one[COPY]), 0.10),
    ]
    for name in [n for n in (LOAD, STORE) if n in one]:
        log2 = (entries - 1).bit_length()
        passes = -(-log2 // 8) if log2 <= 16 else 2 + -(-(log2 - 16) // 4)
        ratio = passes * one[name].ratio(one[COPY])
        claims.append(Claim(f"{name}, each of {passes} passes / {COPY}", ratio, 0.25))
    if one.keys() >= SHARES.keys() and LOAD not in one:
        rounds = zip(*(one[name].wall_s for name in SHARES), strict=True)
        whole = [sum(t * s for t, s in zip(r, SHARES.values(), strict=True)) for r in rounds]
        copies = statistics.median(w / c for w, c in zip(whole, one[COPY].wall_s, strict=True))
        claims.append(Claim(f"14 {COPY} / all-reduce ({copies:.1f})", 14 / copies, 1.0))
    if MX_FP4 in one:
        claims.append(Claim(f"{COMPRESS} / {MX_FP4}", one[COMPRESS].ratio(one[MX_FP4]), 5.0))
    for peer, cast in CAST_OF.items():
        compress = f"{peer} {COMPRESS}"
        if compress in one and cast in one:
            claims.append(Claim(f"{compress} / {cast}", one[compress].ratio(one[cast]), 4.0))
    for name in (COMPRESS, FUSED):
        if (name, 2) in times:
            both = times[name, 2].ratio(one[name])
            claims.append(Claim(f"{name}, 2 threads / 1", both, 1.6))
    return claims


def main(  # noqa: PLR0913  a command line has as many parameters as options
    entries: Annotated[int, typer.Option(help="FP32 entries, a multiple of 256")] = 1 << 24,
    bits: Annotated[int, typer.Option(help="Code width: 1, 2, 4 or 8")] = 4,
    recipe: Annotated[Recipe, typer.Option(help="Scaling and rounding")] = "paper",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="Also time this MX format, such as mxfp8_e4m3; may be repeated"),
    ] = None,
    pairs: Annotated[int, typer.Option(min=1, help="Rounds to take medians of")] = 9,
    threads: Annotated[int, typer.Option(min=1, help="Also run on so many threads")] = 2,
    output: Annotated[Path | None, typer.Option(help="Also write all as JSON")] = None,
) -> None:
    """Time compression beside a copy and torchao's MX cast, and check what is claimed of it."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(-(-entries // 16), generator=generator).repeat_interleave(16)[:entries]
    x = torch.randn(entries, generator=generator) * groups.exp()
    chosen = operations(x, RECIPES[recipe](bits), peer or ())
    times = measure(chosen, pairs, threads)
    rows, claims = rows_of(times, entries), claims_of(times, entries)
    console = Console()
    title = f"{recipe}, {entries} FP32 entries, {bits} bits, median of {pairs} rounds"
    console.print(_rows_table(rows, title), _claims_table(claims))
    if MX_FP4 not in chosen:
        told = (
            'Without torchao, whose cast is missing: pip install -c constraints.txt -e ".[bench]"'
        )
        console.print(told, markup=False)
    if output is not None:
        arguments = {"entries": entries, "bits": bits, "recipe": recipe, "pairs": pairs}
        report = {
            "arguments": {**arguments, "peers": peer or []},
            "environment": environment(),
            "rows": [asdict(row) for row in rows],
            "claims": [{**asdict(claim), "holds": claim.holds} for claim in claims],
        }
        output.write_text(json.dumps(report, indent=2) + "\n")


def _rows_table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("operation", overflow="fold")
    for column in ("threads", "10⁶ entries/s", "cores", "of a copy"):
        table.add_column(column, justify="right")
    for row in rows:
        rate = f"{row.entries_per_s / 1e6:.1f}"
        share = f"{row.share_of_copy:.1%}"
        table.add_row(row.operation, str(row.threads), rate, f"{row.cores:.2f}", share)
    return table


def _claims_table(claims: list[Claim]) -> Table:
    table = Table("ratio of entries/s")
    for column in ("measured", "at least", ""):
        table.add_column(column, justify="right")
    for claim in claims:
        holds = "holds" if claim.holds else "FAILS"
        table.add_row(claim.what, f"{claim.ratio:.2f}", f"{claim.least:.2f}", holds)
    return table


if __name__ == "__main__":
    typer.run(main)
