"""The command: what it refuses, how it is stopped, and (soak) the whole of it."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation import demo
from evaluation.records import Results


def namespaces_of(pid: int) -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return re.findall(rf"^dynamiq-{pid}-\S+", listed.stdout, re.MULTILINE)


def workers_of(pid: int) -> list[int]:
    """The processes that were told that `pid` is their launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text()
        except OSError:
            continue
        if "evaluation.worker" in text and f'"launcher_pid":{pid},' in text:
            found.append(int(path.parent.name))
    return found


class TestRefusals:
    @pytest.fixture(autouse=True)
    def nothing_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(demo, "_compare", lambda *_: pytest.fail("something was started"))
        monkeypatch.setattr(demo, "missing_packages", lambda: "")

    def refusal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
    ) -> str:
        monkeypatch.setattr(sys, "argv", ["demo", *argv])
        with pytest.raises(SystemExit) as ended:
            demo.app()
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert re.fullmatch(r"error: .+\n", said.err), said.err
        return said.err

    @pytest.mark.parametrize(
        ("argv", "words"),
        [
            (["--rate", "0"], "--rate 0: rate_mbit must be at least 0.1"),
            (["--rate", "nan"], "--rate"),
            (["--rate", "inf"], "--rate"),
            (["--steps", "-3"], "--steps must be at least 1, not -3"),
            (["--steps", "0"], "--steps"),
            (["--bits", "1.1"], "1.125"),
            (["--bits", "nan"], "--bits"),
            (["--bits", "0"], "--bits"),
            (["--seed", "-1"], "--seed"),
            (["--output", "/proc/nowhere"], "cannot write there: No such file"),
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
        assert words in self.refusal(monkeypatch, capsys, argv)

    @pytest.mark.parametrize("argv", [["--rate", "fast"], ["--colour"]])
    def test_what_is_no_option_is_named(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        argv: list[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["demo", *argv])
        with pytest.raises(SystemExit) as ended:
            demo.app()
        assert ended.value.code == 2
        assert argv[0] in capsys.readouterr().err

    def test_a_file_in_place_of_the_folder(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        (tmp_path / "taken").write_text("")
        argv = ["--output", str(tmp_path / "taken" / "here")]
        assert "cannot write there" in self.refusal(monkeypatch, capsys, argv)

    def test_missing_packages_are_named(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        tmp_path: Path,
    ) -> None:
        monkeypatch.setattr(demo, "missing_packages", lambda: "not installed: tokenizers; ...")
        argv = ["--output", str(tmp_path)]
        assert "not installed: tokenizers" in self.refusal(monkeypatch, capsys, argv)


def test_steps_follow_from_the_time_and_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "available", lambda: True)
    assert demo._default_steps(25, 5, True) < demo._default_steps(25, 5, False)
    assert demo._default_steps(25, 5, True) < demo._default_steps(100, 5, True)
    assert demo._default_steps(0.1, 5, True) == 3


@pytest.mark.network
@pytest.mark.usefixtures("needs_namespaces", "needs_demo_packages", "pythonpath")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_demo_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "evaluation.demo", "--output", str(tmp_path)]
    with subprocess.Popen(
        argv, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        give_up = time.monotonic() + 60
        while len(workers_of(process.pid)) < 4:
            assert process.poll() is None
            assert time.monotonic() < give_up
            time.sleep(0.05)
        assert len(namespaces_of(process.pid)) == 5
        os.killpg(process.pid, signum)  # a terminal's Ctrl-C reaches the whole group
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signum
    assert "stopped and removed" in errors
    assert "Traceback" not in errors
    assert workers_of(process.pid) == []
    assert namespaces_of(process.pid) == []


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("needs_demo_packages", "pythonpath")
def test_without_namespaces_it_trains_over_loopback_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no `ip` there
    argv = [sys.executable, "-m", "evaluation.demo", "--steps", "1", "--output", str(tmp_path)]
    done = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "No slow network here: no `ip` command" in done.stdout
    results = Results.read((tmp_path / "results.json").read_text())
    assert results.link.kind == "loopback"
    assert "mean nothing" in results.sentence


@pytest.mark.soak
@pytest.mark.network
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("needs_namespaces", "needs_demo_packages", "pythonpath")
def test_the_quick_demo_keeps_its_promises(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    argv = [sys.executable, "-m", "evaluation.demo", "--quick", "--output", str(tmp_path / "out")]
    idle = os.getloadavg()[0] < 0.5  # on a busy machine the time says nothing
    began = time.monotonic()
    done = subprocess.run(argv, check=False, env=environment, capture_output=True, text=True)
    took_s = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    results = Results.read((tmp_path / "out" / "results.json").read_text())
    assert (tmp_path / "out" / "loss_vs_time.png").stat().st_size > 10_000
    bf16, dynamiq = results.runs
    assert bf16.final.bits_per_entry == pytest.approx(16, rel=0.01)
    assert dynamiq.final.bits_per_entry == pytest.approx(4, rel=1e-3)  # 16-byte headers on top
    assert dynamiq.mean("bytes_sent") / bf16.mean("bytes_sent") < 0.26
    assert dynamiq.mean("step_s") < bf16.mean("step_s")
    assert abs(dynamiq.final.validation_loss - bf16.final.validation_loss) < 0.1
    assert dynamiq.rows[-1].loss < dynamiq.rows[0].loss - 0.5
    if idle:
        assert took_s < 180
