"""The check of everything that needs a GPU: how steps are judged, and what it says without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from evaluation import gpu_check
from evaluation.gpu_check import Outcome, Step, exit_status, run, steps

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest, time

def test_passes(): pass
def test_fails(): assert 1 == 2
@pytest.mark.skip(reason="no such thing here")
def test_skips(): pass
def test_sleeps(): time.sleep(60)
"""


@pytest.fixture
def judge(tmp_path):
    """Run the tests above that match an expression as a step."""
    path = tmp_path / "test_sample.py"
    path.write_text(TESTS)

    def outcome(expression, left_s=100.0, **options):
        arguments = (str(path), "-p", "no:cacheprovider", "-k", expression)
        return run(Step("sample", arguments, **options), left_s, tmp_path)

    return outcome


@pytest.mark.parametrize(
    ("expression", "status", "why"),
    [
        ("passes", "passed", "1 passed"),
        ("passes or skips", "passed", "1 passed; 1 skipped: no such thing here"),
        ("skips", "not run", "1 skipped: no such thing here"),
        ("absent", "not run", "no test was selected"),
        ("passes or fails", "failed", "assert 1 == 2"),
    ],
)
def test_a_step_in_which_nothing_ran_has_not_passed(judge, expression, status, why):
    outcome = judge(expression)
    assert outcome.status == status
    assert why in outcome.why
    assert outcome.took_s > 0


def test_a_step_that_is_late_has_failed(judge):
    assert judge("sleeps", limit_s=2.0).why == "not done within 2 s"


def test_steps_that_cannot_run_say_why(judge):
    outcome = judge("passes", missing=lambda: "no CUDA device")
    assert (outcome.status, outcome.why) == ("not run", "no CUDA device")
    assert judge("passes", left_s=0.0).why == "the 285 s for all steps were used up"


def test_the_exit_status_tells_failed_from_not_run():
    passed, failed, absent = (
        Outcome("a check", status, "", 1.0) for status in ("passed", "failed", "not run")
    )
    assert exit_status([passed]) == 0
    assert exit_status([passed, absent]) == 3
    assert exit_status([absent, failed]) == 1


def test_all_steps_select_tests(tmp_path):
    """Collected only, so that a test that is renamed is missed here and not on a GPU."""
    files = {a for step in steps(tmp_path) for a in step.arguments if a.endswith(".py")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "", *sorted(files)]
    # Benchmarks warn in what looks like a worker of pytest-xdist; this is a run of its own.
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    collected = subprocess.run(
        command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False
    )
    assert collected.returncode == 0, collected.stdout
    found = [line for line in collected.stdout.splitlines() if "::" in line]
    for step in steps(tmp_path):
        own = [a.removeprefix(f"{ROOT}/") for a in step.arguments if a.endswith(".py")]
        chosen = step.arguments[step.arguments.index("-k") + 1] if "-k" in step.arguments else ""
        words = [word for word in re.findall(r"[\w-]+", chosen) if word not in ("and", "or")]
        of_files = [line for line in found if line.startswith(tuple(own))]
        assert of_files, step.name
        assert all(any(word in line for line in of_files) for word in words), step.name


@pytest.mark.skipif(torch.cuda.is_available(), reason="tells what is said without a CUDA device")
def test_without_a_gpu_every_step_says_so(tmp_path):
    app = typer.Typer()
    app.command()(gpu_check.main)
    result = CliRunner(env={"OUT": str(tmp_path)}).invoke(app)

    assert result.exit_code == 3
    report = json.loads((tmp_path / "gpu-check.json").read_text())
    assert report["exit_status"] == 3
    assert {step["status"] for step in report["steps"]} == {"not run"}
    assert all("no CUDA device" in step["why"] for step in report["steps"])
    assert report["machine"]["gpu"] is None
    assert "no CUDA device" in (tmp_path / "gpu-check.txt").read_text()


def test_help_installs_nothing():
    script = ROOT / "scripts" / "gpu-check"
    text = subprocess.check_output([script, "--help"], text=True, timeout=10)
    assert "--prepare" in text
    assert "Exit status: 0 all passed, 1 one failed, 3 one could not run" in text


def test_an_interpreter_without_torch_is_refused(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    process = subprocess.run(
        [ROOT / "scripts" / "gpu-check"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 1
    assert f"needs an interpreter with torch, which {python} is not" in process.stderr
