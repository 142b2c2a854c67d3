"""What a trace says: where links stood idle and why, and the same for Perfetto."""

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from evaluation.bench.records import Span
from evaluation.bench.tracing import Trace

WAITING, OTHER = "waiting", "other"
_ROUNDING_S = 1e-9


@dataclass
class LinkUse:
    """How one rank's outgoing link spent a call.

    Attributes:
        whole_s: from the first rank's start to the last one's end.
        sending_s: what the bytes sent take at line rate.
        idle_s: the rest, by what the rank did then: an operation of the codec, ``WAITING`` for
            bytes, or ``OTHER``, which is everything else.
    """

    whole_s: float = 0.0
    sending_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def link_uses(trace: Trace) -> list[LinkUse]:
    """Return what every rank's link did, from how its byte count grew between two samples."""
    rate_bytes = trace.task.rate_mbit * 1e6 / 8
    began_s, ended_s = min(trace.call.began_s), max(trace.call.ended_s)
    uses = []
    for spans, samples in zip(trace.call.spans, trace.sent, strict=True):
        use = LinkUse(whole_s=ended_s - began_s)
        doing = _Doing(spans)
        # A token bucket sends ahead of its rate, then makes up for it.
        credit_s = 0.0
        for (from_s, count), (to_s, later) in pairwise(samples):
            start_s, stop_s = max(from_s, began_s), min(to_s, ended_s)
            if stop_s <= start_s:
                continue
            credit_s += (later - count) / rate_bytes
            busy_s = min(credit_s, stop_s - start_s)
            credit_s -= busy_s
            use.sending_s += busy_s
            idle_s = stop_s - start_s - busy_s
            if idle_s > _ROUNDING_S:
                use.idle_s[doing.at((start_s + stop_s) / 2)] += idle_s
        uses.append(use)
    return uses


@dataclass
class Spent:
    """Time of the mean rank.

    Attributes:
        wall_s: as it passed.
        cpu_s: in which its thread ran; the rest it waited for bytes, or for a processor.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0


def spent(trace: Trace) -> dict[str, Spent]:
    """Return what each operation of the codec took, and waits; ``OTHER`` lies between these.

    Of calls that one thread runs, whose spans follow each other.
    """
    found: dict[str, Spent] = defaultdict(Spent)
    for spans in trace.call.spans:
        inner = sorted((s for s in spans if s.kind != "transfer"), key=lambda s: s.began_s)
        parts = [
            (
                WAITING if s.kind == "wait" else s.name,
                s.began_s,
                s.ended_s,
                s.cpu_began_s,
                s.cpu_ended_s,
            )
            for s in inner
        ]
        parts += [
            (OTHER, a.ended_s, b.began_s, a.cpu_ended_s, b.cpu_began_s) for a, b in pairwise(inner)
        ]
        for name, began_s, ended_s, cpu_began_s, cpu_ended_s in parts:
            found[name].wall_s += (ended_s - began_s) / len(trace.call.spans)
            found[name].cpu_s += (cpu_ended_s - cpu_began_s) / len(trace.call.spans)
    return dict(found)


def spent_table(trace: Trace) -> Table:
    """Return a row per operation."""
    result = Table(
        title="The mean rank's call", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for column in ("operation", "ms", "on a processor"):
        result.add_column(column, justify="left" if column == "operation" else "right")
    found = spent(trace)
    for name in sorted(found, key=_order):
        times = found[name]
        result.add_row(_words(name), f"{1e3 * times.wall_s:.1f}", f"{1e3 * times.cpu_s:.1f}")
    return result


def link_table(trace: Trace) -> Table:
    """Return a column per rank: how long its link sent, and what the rank did while it did not."""
    uses = link_uses(trace)
    names = sorted({name for use in uses for name in use.idle_s}, key=_order)
    caption = "Competing traffic is part of what is sent." if trace.task.flows else None
    result = Table(
        title="Outgoing links: ms of the call", caption=caption, box=SIMPLE_HEAD, pad_edge=False
    )
    result.add_column("")
    for rank in range(len(uses)):
        result.add_column(f"rank {rank}", justify="right")
    lines = [("call", [use.whole_s for use in uses]), ("sending", [u.sending_s for u in uses])]
    lines += [(f"idle: {_words(n)}", [use.idle_s.get(n, 0.0) for use in uses]) for n in names]
    for name, seconds in lines:
        result.add_row(name, *(f"{1e3 * s:.0f}" for s in seconds))
    return result


def write_events(trace: Trace, path: Path) -> None:
    """Write the trace in Chrome's format, which Perfetto and chrome://tracing show.

    Ranks are processes, threads are threads, transfers are asynchronous events and the rate of
    every link is a counter in Mbit/s. Times are microseconds since the first rank began.
    """
    events = [event for rank in range(trace.task.world_size) for event in _events(trace, rank)]
    content = {"traceEvents": events, "otherData": trace.task.model_dump(mode="json")}
    path.write_text(json.dumps(content) + "\n")


def rates(samples: Sequence[tuple[float, int]]) -> Iterator[tuple[float, float]]:
    """Yield when, and how many bytes a second a link sent from then to the next sample."""
    for (from_s, count), (to_s, later) in pairwise(samples):
        yield from_s, (later - count) / (to_s - from_s)


class _Doing:
    """What a rank does at a given time: the last span to begin of those that last."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = sorted((s for s in spans if s.kind != "transfer"), key=lambda s: s.began_s)
        self._begins = [span.began_s for span in self._spans]

    def at(self, when_s: float) -> str:
        last = bisect_right(self._begins, when_s)
        # Codec spans of one thread follow each other; a few waits may lie between.
        waiting = False
        for span in reversed(self._spans[max(0, last - 16) : last]):
            if span.ended_s >= when_s:
                if span.kind == "codec":
                    return span.name
                waiting = True
        return WAITING if waiting else OTHER


def _events(trace: Trace, rank: int) -> Iterator[dict[str, Any]]:
    start_s = min(trace.call.began_s)
    spans = trace.call.spans[rank]
    threads = list(dict.fromkeys(span.thread for span in spans))
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    for number, thread in enumerate(threads):
        name = {"name": thread}
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": name}
    for number, span in enumerate(spans):
        facts = span.model_dump(
            exclude={"kind", "name", "thread", "began_s", "ended_s", "cpu_began_s", "cpu_ended_s"},
            exclude_defaults=True,
        )
        if span.kind != "transfer":
            facts["processor_ms"] = 1e3 * (span.cpu_ended_s - span.cpu_began_s)
        event = {"name": span.name, "cat": span.kind, "pid": rank}
        begins = {"ts": 1e6 * (span.began_s - start_s), "args": facts}
        if span.kind == "transfer":
            yield {**event, **begins, "ph": "b", "id": number}
            yield {**event, "ph": "e", "id": number, "ts": 1e6 * (span.ended_s - start_s)}
        else:
            lasts = {"dur": 1e6 * (span.ended_s - span.began_s)}
            yield {**event, **begins, **lasts, "ph": "X", "tid": threads.index(span.thread)}
    for when_s, rate_bytes in rates(trace.sent[rank]):
        rate = {"sent": 8e-6 * rate_bytes}
        ts = 1e6 * (when_s - start_s)
        yield {"ph": "C", "name": "link, Mbit/s", "pid": rank, "ts": ts, "args": rate}


def _order(name: str) -> tuple[bool, bool, str]:
    return (name == OTHER, name == WAITING, name)


def _words(name: str) -> str:
    return name.replace("_", " ")
