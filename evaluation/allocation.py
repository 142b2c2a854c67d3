"""How long a call decides, and learns, beside how long it compresses.

    OMP_NUM_THREADS=1 .venv/bin/python -m evaluation.allocation

One rank of a ring, one thread. "decide" is all of ``encode``: ranges, order, widths. "learn" is
what happens after the first four calls, and after one in eight of the later ones.
"""

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from dynamiq import Call, DynamiQCompressor, Layout, Message, Ring, State

RECIPES = {
    "paper": DynamiQCompressor.paper,
    "local": DynamiQCompressor.local,
    "rotated": DynamiQCompressor.rotated,
}


def median_s(operation: Callable[[], object], times: int) -> float:
    """Return the median seconds of an operation that has run once."""
    operation()
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def measure(recipe: str, entries: int, world_size: int, times: int) -> tuple[float, float, float]:
    """Return the seconds to compress everything, to decide, and to learn, at 5 bits."""
    compressor = RECIPES[recipe](5.0)
    generator = torch.Generator().manual_seed(0)
    spread = (2 * torch.randn(-(-entries // 256), generator=generator)).exp()
    x = torch.randn(entries, generator=generator) * spread.repeat_interleave(256)[:entries]
    layout, call = Layout(entries, world_size, 256), Call(divisor=world_size)
    schedule, state = Ring().schedule(world_size), State()
    reduced = compressor.statistics(x, layout, call, state).values * world_size

    def decide() -> object:
        return compressor.encode(reduced, layout, schedule, call, state)

    encoding = compressor.encode(reduced, layout, schedule, call, state)
    out = x.clone()
    work, everything = encoding.load(x, 0, out), range(encoding.positions)
    messages = [Message(chunk, 0, 1, 0) for chunk in range(world_size)]
    payloads = [
        torch.empty(encoding.payload_bytes(m, everything), dtype=torch.uint8) for m in messages
    ]

    def compress() -> None:
        for message, payload in zip(messages, payloads, strict=True):
            encoding.compress(work, message, everything, payload)

    compress_s, decide_s = median_s(compress, times), median_s(decide, times)
    encoding.store(work, out)
    learn_s = median_s(lambda: compressor.next_state(encoding, work), times)
    return compress_s, decide_s, learn_s


def main(
    entries: Annotated[int, typer.Option(min=1, help="FP32 entries of a rank")] = 6_553_600,
    world_size: Annotated[int, typer.Option(min=2, help="Ranks of the ring")] = 8,
    times: Annotated[int, typer.Option(min=1, help="To take the median of")] = 15,
) -> None:
    """Print milliseconds, and shares of the time to compress; 10 % are aimed at for deciding."""
    torch.set_num_threads(1)
    table = Table("recipe", "compress", "decide", "share", "learn", "share")
    for recipe in RECIPES:
        compress_s, decide_s, learn_s = measure(recipe, entries, world_size, times)
        times_ms = (f"{1e3 * s:.2f} ms" for s in (compress_s, decide_s, learn_s))
        shares = (f"{s / compress_s:.0%}" for s in (decide_s, learn_s))
        compressed, decided, learned = times_ms
        table.add_row(recipe, compressed, decided, next(shares), learned, next(shares))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
