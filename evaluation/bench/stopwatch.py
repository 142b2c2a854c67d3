"""What a method takes, on one rank and over all ranks."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch.distributed as dist

from dynamiq import Pipeline
from evaluation.bench.records import Measured, Method
from evaluation.records import Record


class Laps(Record):
    """One rank's part of ``Measured``, which explains it; sums over all laps but for the first."""

    times_s: tuple[float, ...] = ()
    sent_bytes: float = 0
    codec_s: float = 0
    wire_s: float = 0
    cpu_s: float = 0
    vnmse: float | None = None


class Stopwatch:
    """Measures one method on this rank.

    Attributes:
        method: what is measured.
        pipeline: what runs it, if it is ours.
        laps: what was measured so far.
    """

    def __init__(self, method: Method, pipeline: Pipeline | None) -> None:
        self.method = method
        self.laps = Laps()
        self.pipeline = pipeline

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Time what happens in the block, which all ranks enter together."""
        before, cpu_s, start = self._spent(), time.process_time(), time.perf_counter()
        yield
        end, after = time.perf_counter(), self._spent()
        self.laps = self.laps.model_copy(
            update={
                "times_s": (*self.laps.times_s, end - start),
                "codec_s": self.laps.codec_s + after[0] - before[0],
                "wire_s": self.laps.wire_s + after[1] - before[1],
                "cpu_s": self.laps.cpu_s + time.process_time() - cpu_s,
            }
        )

    @contextmanager
    def count_bytes(self) -> Iterator[None]:
        """Note what this rank sends in the block, which should hold one call or step."""
        dist.barrier()
        start = _sent_bytes()
        dist.barrier()
        before = _sent_bytes()
        yield
        dist.barrier()  # the others have all that this rank sent, and this has its own cost
        sent = (_sent_bytes() - before) - (before - start)
        self.laps = self.laps.model_copy(update={"sent_bytes": max(0, sent)})

    def note_error(self, vnmse: float) -> None:
        """Note how far a result was from the exact one."""
        self.laps = self.laps.model_copy(update={"vnmse": vnmse})

    def _spent(self) -> tuple[float, float]:
        if self.pipeline is None:
            return 0.0, 0.0
        metrics = self.pipeline.metrics()
        return metrics.codec_s, metrics.wire_s


def gather(watches: Sequence[Stopwatch]) -> tuple[Measured, ...]:
    """Return what all ranks have measured; collective."""
    mine = [watch.laps.model_dump() for watch in watches]
    every: list[list[dict[str, object]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, mine)
    return tuple(
        _together(watch, [Laps.model_validate(ranks[i]) for ranks in every])
        for i, watch in enumerate(watches)
    )


def _together(watch: Stopwatch, ranks: list[Laps]) -> Measured:
    times_s = tuple(max(times) for times in zip(*(rank.times_s for rank in ranks), strict=True))
    has_codec = watch.pipeline is not None
    compressed = watch.pipeline.metrics().compressed_calls > 0 if watch.pipeline else None
    return Measured(
        method=watch.method,
        times_s=times_s,
        sent_bytes=tuple(rank.sent_bytes for rank in ranks),
        codec_s=fmean(rank.codec_s for rank in ranks) / len(times_s) if has_codec else None,
        wire_s=fmean(rank.wire_s for rank in ranks) / len(times_s) if has_codec else None,
        cpu_s=sum(rank.cpu_s for rank in ranks) / len(times_s),
        compressed=compressed,
        vnmse=ranks[0].vnmse,
    )


def _sent_bytes() -> int:
    """Return what the interface that Gloo uses has sent so far."""
    interface = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"]
    return int((interface / "statistics" / "tx_bytes").read_text())
