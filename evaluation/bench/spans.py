"""What one rank does during a call, noted at the seams that the library has for other formats.

A traced compressor is the compressor itself, whose operations note when they ran; a traced
transport notes its transfers. The pipeline is that of any other run.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq import Compressor, GlooTransport, Message
from evaluation.bench.collectives import TIMEOUT_S, WARM_UP_CALLS, entries, pipeline_of
from evaluation.bench.records import Span, SpanKind, Traced, TraceTask

_OPERATIONS = frozenset(
    {
        "load",
        "compress",
        "decompress",
        "decompress_accumulate",
        "decompress_accumulate_recompress",
        "store",
    }
)


def trace_calls(task: TraceTask, ready: Callable[[], None]) -> Traced:
    """Return the call of a middling time, as all ranks saw it; collective."""
    timeline = Timeline()
    method = task.method.model_copy(
        update={"compressor": traced_compressor(task.method.compressor, timeline)}
    )
    transport = TracedGlooTransport(timeline, timeout_s=TIMEOUT_S)
    x = entries(task.tensor_bytes // 4, task.seed, dist.get_rank())
    work = torch.empty_like(x)
    calls: list[tuple[float, float, list[Span]]] = []
    with pipeline_of(method, task.seed, transport) as pipeline:
        for number in range(WARM_UP_CALLS + task.calls):
            if number == WARM_UP_CALLS:
                ready()
                calls.clear()
            work.copy_(x)
            timeline.spans.clear()
            dist.barrier()
            began_s = time.perf_counter()
            pipeline.all_reduce(work, "sum", key="trace")
            calls.append((began_s, time.perf_counter(), list(timeline.spans)))
    took_s = torch.tensor([ended - began for began, ended, _ in calls])
    dist.all_reduce(took_s, dist.ReduceOp.MAX)
    kept = calls[int(took_s.argsort()[len(calls) // 2])]
    every: list[tuple[float, float, list[Span]]] = [kept] * dist.get_world_size()
    dist.all_gather_object(every, kept)
    return Traced(
        spans=tuple(tuple(spans) for _, _, spans in every),
        began_s=tuple(began for began, _, _ in every),
        ended_s=tuple(ended for _, ended, _ in every),
    )


class Timeline:
    """The spans of one rank; several threads may add to it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @contextmanager
    def span(self, kind: SpanKind, name: str, **facts: Any) -> Iterator[None]:
        """Note what happens in the block."""
        cpu_began_s, began_s = time.thread_time(), time.perf_counter()
        yield
        ended_s = time.perf_counter()
        facts |= {"cpu_began_s": cpu_began_s, "cpu_ended_s": time.thread_time()}
        self.add(kind, name, began_s, ended_s, **facts)

    def add(self, kind: SpanKind, name: str, began_s: float, ended_s: float, **facts: Any) -> None:
        """Note what lasted from then to then."""
        thread = threading.current_thread().name
        self.spans.append(
            Span(kind=kind, name=name, thread=thread, began_s=began_s, ended_s=ended_s, **facts)
        )


def traced_compressor(compressor: Compressor, timeline: Timeline) -> Compressor:
    """Return an equal compressor, of a subclass that notes what it and its encodings do."""

    class Traced(type(compressor)):  # type: ignore[misc]  # the class is known at run time
        def statistics(self, *arguments: Any) -> Any:
            with timeline.span("codec", "statistics"):
                return super().statistics(*arguments)

        def encode(self, *arguments: Any) -> Any:
            with timeline.span("codec", "encode"):
                encoding = super().encode(*arguments)
            return _TracedEncoding(encoding, timeline)

        def next_state(self, *arguments: Any) -> Any:
            with timeline.span("codec", "next_state"):
                return super().next_state(*arguments)

        @property
        def stateful(self) -> bool:
            return compressor.stateful  # which may look for an override of next_state

    traced: Compressor = Traced(**dict(compressor))
    return traced


class TracedGlooTransport(GlooTransport):
    """Notes its transfers, and the waits for them."""

    def __init__(self, timeline: Timeline, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._timeline = timeline

    def post(  # noqa: PLR0913 - the transport's
        self,
        send: Tensor | None,
        to: int,
        nbytes: int,
        source: int,
        channel: int,
        label: str,
        into: Tensor | None = None,
    ) -> Callable[[], Tensor | None]:
        """Start an exchange."""
        began_s = time.perf_counter()
        wait = super().post(send, to, nbytes, source, channel, label, into)
        facts = {"sent_bytes": 0 if send is None else send.numel(), "received_bytes": nbytes}

        def traced_wait() -> Tensor | None:
            with self._timeline.span("wait", label):
                received = wait()
            self._timeline.add("transfer", label, began_s, time.perf_counter(), **facts)
            return received

        return traced_wait


class _TracedEncoding:
    """An encoding, as far as whoever drives the collective can tell."""

    def __init__(self, plain: Any, timeline: Timeline) -> None:
        self._plain = plain
        self._timeline = timeline

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._plain, name)
        return partial(self._run, name, value) if name in _OPERATIONS else value

    def _run(self, name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        message = next((a for a in arguments if isinstance(a, Message)), None)
        positions = next((a for a in arguments if isinstance(a, range)), None)
        with self._timeline.span(
            "codec",
            name,
            hop=None if message is None else message.hop,
            positions=None if positions is None else (positions.start, positions.stop),
        ):
            return operation(*arguments)
