"""What a format's operations cost a rank while all ranks of its machine do the same."""

from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch
from torch import Tensor

from dynamiq.compressors import (
    DynamiQCompressor,
    MXCompressor,
    OmniReduceCompressor,
    THCCompressor,
    Uncompressed,
)
from dynamiq.core.compressor import Compressor, State
from dynamiq.planner.profiles.hardware import CodecCost, OperationCost
from dynamiq.probe.clock import Clock
from dynamiq.probe.operations import PER_CALL, PER_MESSAGE, STATISTICS_MESSAGE, RankAlone
from dynamiq.probe.together import Together
from dynamiq.topologies import Ring

MESSAGE_ENTRIES = (1 << 13, 1 << 17, 1 << 20)
"""Entries of the messages whose operations are timed; a bucket has one for each rank.

Those of large buckets find nothing in caches, and their memory is fresh from the system.
"""
_MOST_RANKS = 4
"""Ranks of the schedule whose operations are done: more would only mean a larger bucket."""
_WARM_UP, _CALLS = 4, 8
"""DynamiQ learns from its first four calls, and from one in eight later on."""
_GROUP = 256


def candidates() -> tuple[Compressor, ...]:
    """Return the formats that are measured; costs of budgets in between lie in between."""
    return (
        Uncompressed("fp32"),
        Uncompressed("bf16"),
        MXCompressor(format="mxfp8_e4m3"),
        MXCompressor(format="mxfp6_e3m2"),
        MXCompressor(format="mxfp4_e2m1"),
        THCCompressor(),
        OmniReduceCompressor(mode="topk", bit_budget=4.0),
        *(DynamiQCompressor(bit_budget=bits) for bits in (2.0, 3.0, 4.0, 5.0, 6.0, 8.0)),
    )


def measure_codec(
    compressor: Compressor,
    together: Together,
    cores_per_rank: float | None,
    advance: Callable[[], None],
) -> CodecCost:
    """Return what a format's operations cost; collective.

    Args:
        compressor: The format.
        together: The ranks, which all measure it at the same time.
        cores_per_rank: As in :class:`dynamiq.planner.profiles.hardware.Processor`; None on a GPU.
        advance: Called after each size of message.
    """
    names = (*PER_CALL, *PER_MESSAGE, STATISTICS_MESSAGE)
    points: dict[str, list[tuple[int, float]]] = {name: [] for name in names}
    for message_entries in MESSAGE_ENTRIES:
        clock = _run(compressor, Clock(together, cores_per_rank), message_entries)
        # Of what is not done in every call, such as learning, the mean over calls counts.
        mine = [fmean(clock.seconds[name]) for name in PER_CALL]
        mine += [median(clock.seconds.get(name, [0.0])) for name in names[len(PER_CALL) :]]
        for name, seconds in zip(names, together.largest(mine), strict=True):
            points[name].append((clock.entries.get(name, 0), seconds))
        advance()
    return CodecCost(compressor=compressor, **{name: fit(points[name]) for name in names})


def fit(points: Sequence[tuple[int, float]]) -> OperationCost:
    """Return the line through (entries, seconds) whose relative errors have the least squares.

    Neither of its terms is negative.
    """
    weights = [1 / max(seconds, 1e-9) ** 2 for _, seconds in points]
    total = sum(weights)
    mean_n = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    mean_s = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = rise = 0.0
    for w, (n, s) in zip(weights, points, strict=True):
        spread += w * (n - mean_n) ** 2
        rise += w * (n - mean_n) * (s - mean_s)
    entry_s = max(0.0, rise / spread) if spread else 0.0
    fixed_s = mean_s - entry_s * mean_n
    if fixed_s < 0:
        fixed_s, entry_s = 0.0, mean_s / mean_n
    return OperationCost(fixed_s=fixed_s, entry_s=entry_s)


def gradient(entries: int, seed: int) -> Tensor:
    """Return float32[entries], as uneven as gradients are: a log-normal scale per 256 entries."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(-(-entries // _GROUP), generator=generator).exp_()
    values = torch.randn(entries, generator=generator)
    return values.mul_(scales.repeat_interleave(_GROUP)[:entries])


def _run(compressor: Compressor, clock: Clock, message_entries: int) -> Clock:
    """Do calls with messages of that size; return the clock, which knows of all but the first."""
    together = clock.together
    schedule = Ring().schedule(min(together.world_size, _MOST_RANKS))
    alone = RankAlone(compressor, schedule, together.rank % schedule.world_size, clock)
    x = gradient(message_entries * schedule.world_size, seed=1).to(together.device)
    state = State()
    for number in range(_WARM_UP + _CALLS):
        if number == _WARM_UP:
            clock.seconds.clear()
        together.largest([0.0])  # all begin at once
        state = alone.call(x, x.clone(), number, state)
    return clock
