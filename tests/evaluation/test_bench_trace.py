"""Traces: they change nothing, note what happens, and say why links stood idle."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from dynamiq import Call, Compressor, DynamiQCompressor, MXCompressor, Ring, Uncompressed
from dynamiq.core.metrics import simulate
from evaluation.bench import timeline, trace_figure, tracing
from evaluation.bench.records import Ours, Span, Traced, TraceTask
from evaluation.bench.spans import Timeline, traced_compressor
from evaluation.bench.tracing import Trace

METHOD = Ours(
    name="DynamiQ 5 bits",
    compressor=DynamiQCompressor(bit_budget=5),
    topology=Ring(),
    segments=2,
)


def task(**changes: object) -> TraceTask:
    values: dict[str, object] = {"world_size": 2, "rate_mbit": 8.0, "tensor_bytes": 4 << 10}
    return TraceTask.model_validate({"method": METHOD, **values, **changes})


def span(kind: str, name: str, *clocks: float) -> Span:
    names = ("began_s", "ended_s", "cpu_began_s", "cpu_ended_s")
    values = dict(zip(names, clocks, strict=False))
    return Span.model_validate({"kind": kind, "name": name, "thread": "main", **values})


@pytest.fixture
def trace() -> Trace:
    """Links of 1 MB/s; rank 0 sends in the second half, rank 1 in the first."""
    spans = (
        (
            span("codec", "compress", 100.0, 100.4, 7.0, 7.3),
            span("wait", "statistics, all-gather step 1 of 1", 100.5, 101.0, 7.4, 7.4),
            span("transfer", "statistics, all-gather step 1 of 1", 100.45, 101.0),
        ),
        (
            span("wait", "statistics, all-gather step 1 of 1", 100.0, 100.5, 3.0, 3.0),
            span("codec", "decompress", 100.7, 100.8, 3.0, 3.1),
        ),
    )
    ticks = [100 + 0.1 * i for i in range(11)]
    first = tuple((at, 100_000 * max(0, i - 5)) for i, at in enumerate(ticks))
    second = tuple((at, 100_000 * min(5, i)) for i, at in enumerate(ticks))
    call = Traced(spans=spans, began_s=(100.0, 100.0), ended_s=(101.0, 101.0))
    return Trace(task=task(), call=call, sent=(first, second))


class TestSpans:
    @pytest.mark.parametrize(
        "compressor",
        [DynamiQCompressor(bit_budget=4), MXCompressor("mxfp4_e2m1"), Uncompressed("bf16")],
        ids=lambda compressor: compressor.kind,
    )
    def test_tracing_changes_no_bit(self, compressor: Compressor) -> None:
        x = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0))
        seen = Timeline()
        traced = traced_compressor(compressor, seen)
        assert traced.digest() == compressor.digest()
        assert (traced.stateful, traced.needs_key) == (compressor.stateful, compressor.needs_key)
        plain, other = (simulate(x, c, Ring(), Call(0)).result for c in (compressor, traced))
        assert torch.equal(plain, other)
        assert {s.name for s in seen.spans} >= {
            "encode",
            "load",
            "compress",
            "decompress_accumulate_recompress",
            "decompress",
            "store",
            "next_state",
        }
        assert all(s.kind == "codec" and s.began_s <= s.ended_s for s in seen.spans)
        assert {s.hop for s in seen.spans if s.name == "compress"} == {0}
        assert all(s.positions is not None for s in seen.spans if s.name == "decompress")


class TestTimeline:
    def test_idle_time_is_what_the_link_does_not_send(self, trace: Trace) -> None:
        first, second = timeline.link_uses(trace)
        assert first.whole_s == second.whole_s == pytest.approx(1)
        assert first.sending_s == pytest.approx(0.5)
        assert first.idle_s == pytest.approx({"compress": 0.4, "other": 0.1})
        assert second.idle_s == pytest.approx({"decompress": 0.1, "other": 0.4})

    def test_a_burst_is_paid_back(self, trace: Trace) -> None:
        ticks = [100 + 0.1 * i for i in range(11)]
        burst = tuple((at, 300_000 if i else 0) for i, at in enumerate(ticks))
        other = trace.model_copy(update={"sent": (burst, trace.sent[1])})
        use = timeline.link_uses(other)[0]
        assert use.sending_s == pytest.approx(0.3)
        assert sum(use.idle_s.values()) == pytest.approx(0.7)

    def test_time_is_told_from_processor_time(self, trace: Trace) -> None:
        found = timeline.spent(trace)
        assert {name: s.wall_s for name, s in found.items()} == pytest.approx(
            {"compress": 0.4 / 2, "decompress": 0.1 / 2, "waiting": 1.0 / 2, "other": 0.3 / 2}
        )
        assert {name: s.cpu_s for name, s in found.items()} == pytest.approx(
            {"compress": 0.3 / 2, "decompress": 0.1 / 2, "waiting": 0, "other": 0.1 / 2}
        )

    def test_perfetto_gets_every_span(self, trace: Trace, tmp_path: Path) -> None:
        timeline.write_events(trace, tmp_path / "trace.json")
        content = json.loads((tmp_path / "trace.json").read_text())
        events = content["traceEvents"]
        assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
            ("compress", 0, pytest.approx(0), pytest.approx(4e5)),
            ("statistics, all-gather step 1 of 1", 0, pytest.approx(5e5), pytest.approx(5e5)),
            ("statistics, all-gather step 1 of 1", 1, pytest.approx(0), pytest.approx(5e5)),
            ("decompress", 1, pytest.approx(7e5), pytest.approx(1e5)),
        ]
        assert [e["ph"] for e in events if e["pid"] == 0 and e.get("cat") == "transfer"] == [
            "b",
            "e",
        ]
        counters = [e["args"]["sent"] for e in events if e["ph"] == "C" and e["pid"] == 1]
        assert counters == pytest.approx([8.0] * 5 + [0.0] * 5)
        assert content["otherData"]["method"]["segments"] == 2

    @pytest.mark.filterwarnings("default")  # matplotlib is not ours to keep free of them
    def test_the_picture_is_drawn(self, trace: Trace, tmp_path: Path) -> None:
        pytest.importorskip("matplotlib", reason="not installed: matplotlib (the extra `demo`)")
        trace_figure.draw(trace, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")

    def test_transfers_of_one_time_get_rows_of_their_own(self) -> None:
        spans = [
            span("transfer", "a", 0, 2),
            span("transfer", "b", 1, 3),
            span("transfer", "c", 2, 4),
        ]
        assert trace_figure._rows(spans) == [(0, 2), (1, 2), (0, 2)]


def test_the_kernel_s_table_is_read() -> None:
    table = """Inter-|   Receive                            |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo: 11 1 0 0 0 0 0 0 22 1 0 0 0 0 0 0
  eth0: 33 1 0 0 0 0 0 0 44 1 0 0 0 0 0 0
"""
    assert tracing._sent_bytes(table, "eth0") == 44
    assert tracing._sent_bytes(table, "eth1") == 0


@pytest.mark.network
@pytest.mark.usefixtures("needs_namespaces", "pythonpath")
def test_a_call_is_watched_on_all_ranks_and_their_links() -> None:
    found = tracing.trace(task(rate_mbit=100, tensor_bytes=2 << 20, calls=1))
    assert len(found.call.spans) == len(found.sent) == 2
    payload = (2 << 20) * 5 / 32
    for spans, samples, began_s, ended_s in zip(
        found.call.spans, found.sent, found.call.began_s, found.call.ended_s, strict=True
    ):
        assert all(began_s <= s.began_s <= s.ended_s <= ended_s for s in spans)
        transfers = [s for s in spans if s.kind == "transfer"]
        assert sum(s.sent_bytes for s in transfers) == pytest.approx(payload, rel=0.05)
        assert len(transfers) == sum(s.kind == "wait" for s in spans)
        steps = [s for s in transfers if "gradients, all-gather step 1 of 1" in s.name]
        assert len(steps) == METHOD.segments
        assert samples[-1][1] == pytest.approx(payload, rel=0.2)
    for use in timeline.link_uses(found):
        assert use.whole_s == pytest.approx(use.sending_s + sum(use.idle_s.values()), rel=0.1)
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    assert not re.search(rf"dynamiq-{os.getpid()}-", listed.stdout)
