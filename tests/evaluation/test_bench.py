"""The benchmark: what it refuses, what its numbers mean, and one small run of each kind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from dynamiq import DynamiQCompressor, Ring
from evaluation.bench import __main__ as command
from evaluation.bench import arguments, report, runs
from evaluation.bench.page import write_page
from evaluation.bench.records import (
    AllReduceTask,
    BenchRow,
    Existing,
    Findings,
    Measured,
    Method,
    Ours,
    TrainingTask,
    Warm,
    read_answer,
)
from evaluation.network import Availability
from evaluation.rows import append_row, read_rows

FP32, BF16, NONE = (Existing.model_validate({"name": n}) for n in ("fp32", "bf16", "none"))


def ours(segments: int = 1, bits: float = 5) -> Ours:
    return Ours(
        name=f"DynamiQ {bits:g} bits",
        compressor=DynamiQCompressor(bit_budget=bits),
        topology=Ring(),
        segments=segments,
    )


def measured(method: Method, *times_s: float, sent: float = 1e6) -> Measured:
    is_ours = isinstance(method, Ours)
    return Measured(
        method=method,
        times_s=times_s,
        sent_bytes=(sent / 2, sent),
        codec_s=0.1 if is_ours else None,
        wire_s=0.2 if is_ours else None,
        cpu_s=0.3,
        compressed=is_ours or None,
        vnmse=1e-3 if is_ours else None,
    )


def row(settings: AllReduceTask | TrainingTask, *found: Measured) -> BenchRow:
    return BenchRow(
        settings=settings,
        command="scripts/bench all-reduce",
        measured=found,
        link_mbit=7.6,
        machine_cores=1.5,
        environment={"cpus": 2, "processor": "a processor", "packages": {"torch": "2"}},
        commit="abc",
    )


def all_reduce_task(*methods: Method, **changes: object) -> AllReduceTask:
    values: dict[str, object] = {"rate_mbit": 8.0, "rounds": 3, "tensor_bytes": 4 << 20}
    return AllReduceTask.model_validate({"methods": methods, **values, **changes})


@pytest.fixture
def all_reduces() -> BenchRow:
    """A link of 1 MB/s; ours sends 1 MB in 2 s."""
    task = all_reduce_task(FP32, BF16, ours(4))
    return row(
        task,
        measured(FP32, 10.0, 20.0, 12.0, sent=9e6),
        measured(BF16, 5.0, 10.0, 6.0, sent=4.5e6),
        measured(ours(4), 2.0, 5.0, 2.0),
    )


@pytest.fixture
def steps() -> BenchRow:
    """A step takes 2 s alone."""
    task = TrainingTask(
        rate_mbit=8, methods=(NONE, BF16, ours()), rounds=1, steps=2, workload="language_model"
    )
    found = [measured(NONE, 2.0, 2.0), measured(BF16, 4.0, 4.0), measured(ours(), 2.5, 2.5)]
    return row(task, *found)


class TestNumbers:
    def test_the_share_is_what_the_link_rate_explains(self, all_reduces: BenchRow) -> None:
        shares = [m.link_share(all_reduces.settings.rate_mbit) for m in all_reduces.measured]
        assert shares == pytest.approx([9 / 12, 4.5 / 6, 1 / 2])

    def test_ratios_are_medians_of_the_rounds_ratios(self, all_reduces: BenchRow) -> None:
        fp32, bf16, mine = all_reduces.measured
        assert report.speedup(mine, fp32) == pytest.approx(5)  # of 5, 4 and 6
        assert report.speedup(mine, bf16) == pytest.approx(2.5)
        assert report.speedup(mine, None) is None

    def test_cores_are_processor_time_over_time(self) -> None:
        assert measured(FP32, 0.1, 0.3).cores == pytest.approx(1.5)

    def test_exposed_is_what_a_step_takes_longer(self, steps: BenchRow) -> None:
        assert [report.exposed_s(steps, m) for m in steps.measured] == [0, 2, 0.5]
        _, lines = report.cells(steps)
        assert [line[4:7] for line in lines] == [
            ["", "", ""],
            ["2000", "0.50", "1.00"],
            ["500", "0.20", "0.25"],
        ]

    def test_what_was_too_small_to_compress_says_so(self, all_reduces: BenchRow) -> None:
        fp32, _, mine = all_reduces.measured
        assert fp32.label == "Gloo FP32"
        assert mine.label == "DynamiQ 5 bits, ring, 4 segments"
        small = mine.model_copy(update={"compressed": False})
        assert small.label == "DynamiQ 5 bits, ring, 4 segments (too small: uncompressed)"

    def test_without_a_step_alone_nothing_is_exposed(self, steps: BenchRow) -> None:
        other = steps.model_copy(update={"measured": steps.measured[1:]})
        assert report.exposed_s(other, other.measured[0]) is None

    @pytest.mark.parametrize(
        ("text", "count", "shown"),
        [
            ("4096", 4096, "4 KiB"),
            ("64KiB", 65536, "64 KiB"),
            ("1.5MiB", 3 << 19, "1.5 MiB"),
            ("1gib", 1 << 30, "1 GiB"),
            ("100b", 100, "100 B"),
        ],
    )
    def test_sizes(self, text: str, count: int, shown: str) -> None:
        assert report.read_size(text) == count
        assert report.size(count) == shown

    def test_rounds_fit_the_time(self) -> None:
        assert command._rounds(4, 200, 1 << 12, 4) == 30
        assert command._rounds(4, 25, 1 << 28, 4) == 3
        assert 3 < command._rounds(4, 200, 1 << 24, 4) < 30


class TestRecords:
    @pytest.mark.parametrize("answer", [Warm(), Findings(measured=(measured(ours(), 1.0),))])
    def test_an_answer_crosses_the_pipe_unchanged(self, answer: Warm | Findings) -> None:
        assert read_answer(answer.model_dump_json()) == answer

    def test_rows_are_read_as_they_were(
        self, all_reduces: BenchRow, steps: BenchRow, tmp_path: Path
    ) -> None:
        for each in all_reduces, steps:
            append_row(tmp_path / "rows", each)
        assert read_rows(tmp_path / "rows", BenchRow) == [all_reduces, steps]

    def test_a_method_that_is_named_twice_is_refused(self) -> None:
        with pytest.raises(ValidationError, match=r"named twice: DynamiQ 5 bits, ring"):
            all_reduce_task(ours(), FP32, ours())

    @pytest.mark.parametrize("name", ["none", "powersgd"])
    def test_what_is_no_all_reduce_is_refused(self, name: str) -> None:
        with pytest.raises(ValidationError, match="no all-reduce"):
            all_reduce_task(Existing.model_validate({"name": name}))

    def test_a_finished_run_is_not_done_again(
        self, all_reduces: BenchRow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done: list[object] = []

        def run(task: AllReduceTask, _: str) -> BenchRow:
            done.append(task)
            return all_reduces.model_copy(update={"settings": task})

        monkeypatch.setattr(runs, "run", run)
        one, other = all_reduce_task(FP32), all_reduce_task(FP32, flows=1)
        assert len(list(runs.rows([one], tmp_path / "rows", ""))) == 1
        assert [r.settings for r in runs.rows([one, other], tmp_path / "rows", "")] == [other]
        assert done == [one, other]


class TestRefusals:
    def refusal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
    ) -> str:
        monkeypatch.setattr(command, "_run", lambda *_: pytest.fail("something was started"))
        monkeypatch.setattr(command.workloads, "missing_packages", lambda _: "")
        monkeypatch.setattr(sys, "argv", ["bench", *argv])
        with pytest.raises(SystemExit) as ended:
            command.app()
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["all-reduce", "--rates", "0"], "rate_mbit must be at least 0.1"),
            (["all-reduce", "--rates", "1,fast"], "--rates 1,fast: not a list"),
            (["all-reduce", "--sizes", "4KB"], "--sizes 4KB: not a list"),
            (["all-reduce", "--sizes", ""], "--sizes : not a list"),
            (["all-reduce", "--sizes", "3"], "multiple of 4"),
            (
                ["all-reduce", "--hosts", "1"],
                "world_size: Input should be greater than or equal to 2",
            ),
            (["all-reduce", "--hosts", "300"], "1 to 253"),
            (["all-reduce", "--bits", "0.5"], "1.125"),
            (["all-reduce", "--topologies", "star"], "star"),
            (
                ["all-reduce", "--segments", "0"],
                "segments: Input should be greater than or equal to 1",
            ),
            (["all-reduce", "--existing", "none"], "no all-reduce"),
            (["all-reduce", "--existing", "int8"], "'fp32', 'bf16'"),
            (["all-reduce", "--output", "/proc/nowhere"], "cannot write there"),
            (["train", "--workload", "chess"], "--workload chess: there are language_model"),
            (["page", "/nowhere", "--output", "/tmp/x.md"], "no rows"),
        ],
    )
    def test_wrong_usage_is_one_line_and_exit_code_2(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        argv: list[str],
        words: str,
        tmp_path: Path,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        said = self.refusal(monkeypatch, capsys, argv)
        assert re.fullmatch(r"error: .+\n", said), said
        assert words in said

    def test_without_namespaces_it_says_why(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        monkeypatch.setattr(arguments, "available", lambda: Availability("run it with sudo"))
        argv = ["all-reduce", "--output", str(tmp_path)]
        assert "no slow network here: run it with sudo" in self.refusal(monkeypatch, capsys, argv)


@pytest.mark.filterwarnings("default")  # matplotlib is not ours to keep free of them
class TestPage:
    def test_tables_pictures_and_origin(
        self, all_reduces: BenchRow, steps: BenchRow, tmp_path: Path
    ) -> None:
        pytest.importorskip("matplotlib", reason="not installed: matplotlib (the extra `demo`)")
        busy = row(all_reduce_task(FP32, flows=2), measured(FP32, 1.0))
        rows = [all_reduces, steps, busy]
        written = write_page(rows, tmp_path / "bench.md", "the command")
        names = ["bench.md", "bench-all-reduce.png", "bench-steps.png"]
        assert [path.name for path in written] == names
        assert all(path.stat().st_size > 500 for path in written)
        text = (tmp_path / "bench.md").read_text()
        assert "### all-reduce of 4 MiB FP32, 4 hosts, 8 Mbit/s" in text
        assert "### all-reduce of 4 MiB FP32, 4 hosts, 8 Mbit/s, 2 competing flows per host" in text
        line = "| DynamiQ 5 bits, ring, 4 segments | 2000 | 2000 to 5000 | 1 | 0.50 | 5.00 | 2.50 |"
        assert line in text
        assert "3 runs at abc, on a processor (2 processors), with torch 2" in text
        assert "    the command\n" in text


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return re.findall(rf"^dynamiq-{pid}-\S+", listed.stdout, re.MULTILINE)


@pytest.mark.network
@pytest.mark.usefixtures("needs_namespaces", "pythonpath")
class TestRuns:
    def test_bytes_are_counted_and_competing_traffic_takes_its_share(self) -> None:
        methods = (FP32, BF16, ours(segments=2))
        task = all_reduce_task(
            *methods, world_size=2, rate_mbit=100, flows=1, rounds=3, tensor_bytes=1 << 20
        )
        found = runs.run(task, "the test")
        assert [m.method for m in found.measured] == list(methods)
        fp32, bf16, mine = found.measured
        assert max(fp32.sent_bytes) == pytest.approx(1 << 20, rel=0.05)  # 2 (n - 1) / n times
        assert max(bf16.sent_bytes) == pytest.approx(1 << 19, rel=0.05)
        assert max(mine.sent_bytes) == pytest.approx((1 << 20) * 5 / 32, rel=0.2)
        assert all(len(m.times_s) == 3 for m in found.measured)
        assert fp32.vnmse == 0
        assert 0 < bf16.vnmse < 1e-4 < mine.vnmse < 1e-2
        assert mine.codec_s > 0
        assert [m.compressed for m in found.measured] == [None, None, True]
        # Alone it would be 0.9.
        assert 0.1 < fp32.link_share(100) < 0.8
        assert 0 < found.machine_cores <= os.cpu_count()
        assert namespaces_of(os.getpid()) == []

    def test_a_stopped_run_leaves_nothing(self, tmp_path: Path) -> None:
        argv = [sys.executable, "-m", "evaluation.bench", "all-reduce", "--hosts", "2"]
        with subprocess.Popen(
            [*argv, "--output", str(tmp_path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            give_up = time.monotonic() + 60
            while len(namespaces_of(process.pid)) < 3:
                assert process.poll() is None
                assert time.monotonic() < give_up
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        assert process.returncode == 128 + signal.SIGINT
        assert "stopped and removed" in errors
        assert namespaces_of(process.pid) == []
        assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.soak
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("needs_namespaces", "needs_demo_packages", "pythonpath")
def test_the_command_measures_training_by_every_method(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "evaluation.bench", "train", "--hosts", "2", "--rounds", "1"]
    argv += ["--steps", "2", "--rates", "100", "--output", str(tmp_path)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = read_rows(tmp_path / "rows.jsonl", BenchRow)
    alone, fp32, bf16, fp16, powersgd, mine = found.measured
    assert max(alone.sent_bytes) < 10_000
    assert max(fp32.sent_bytes) == pytest.approx(4 * 5_868_288, rel=0.05)
    for half in bf16, fp16:
        assert max(half.sent_bytes) == pytest.approx(2 * 5_868_288, rel=0.05)
    assert max(powersgd.sent_bytes) < max(mine.sent_bytes) < max(bf16.sent_bytes) / 2
    assert (tmp_path / "steps.png").exists()
    assert "PowerSGD" in json.dumps([m.method.label for m in found.measured])
