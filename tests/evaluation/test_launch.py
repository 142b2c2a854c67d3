"""Workers report, fail and end together. Scripts of a few lines stand in for training."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from evaluation.launch import TRAINING, WorkerError, Workers
from evaluation.network import Loopback
from evaluation.records import FinalRow, Plan, StepRow

PREAMBLE = """
import json, os, sys, time
config = json.loads(sys.argv[sys.argv.index("--config") + 1])
rank, steps = config["seat"]["rank"], config["plan"]["steps"]
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
def step(number):
    names = ("loss", "step_s", "compute_s", "codec_s", "wire_s", "elapsed_s")
    row = {"kind": "step", "step": number, "bytes_sent": 10} | dict.fromkeys(names, 1.0)
    print(json.dumps(row), flush=True)
def final():
    row = {"kind": "final", "validation_loss": 6.0, "vnmse": 0.0, "bits_per_entry": 16.0}
    print(json.dumps(row), flush=True)
"""


@pytest.fixture
def workers(tmp_path: Path, plan: Plan):
    """Makes workers of a script, and proves at the end that none of them is left."""
    folder = tmp_path / "pids"
    folder.mkdir()
    script = tmp_path / "worker.py"

    def make(body: str) -> Workers:
        script.write_text(PREAMBLE + body)
        command: Sequence[str] = (sys.executable, str(script), str(folder))
        return Workers(replace(TRAINING, command=command), plan, Loopback())

    yield make
    for path in folder.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_rows_come_in_order(workers) -> None:
    with workers("if rank == 0: [step(i) for i in range(steps)]; final()") as run:
        rows = list(run.rows())
    assert [type(row) for row in rows] == [StepRow, StepRow, FinalRow]
    assert [row.step for row in rows[:2]] == [0, 1]


def test_rows_come_while_workers_run(workers) -> None:
    with workers("if rank == 0: step(0)\ntime.sleep(300)") as run:
        assert next(run.rows()).step == 0


def test_the_first_failure_is_named_with_its_last_words(workers) -> None:
    body = "if rank == 2: sys.exit('the reason')\ntime.sleep(300)"
    with (
        pytest.raises(WorkerError, match=r"(?s)rank 2 .*exit code 1.*the reason"),
        workers(body) as run,
    ):
        list(run.rows())


def test_a_killed_worker_is_named(workers) -> None:
    body = "if rank == 3: os.kill(os.getpid(), 9)\ntime.sleep(300)"
    with pytest.raises(WorkerError, match="rank 3 was ended by signal 9"), workers(body) as run:
        list(run.rows())


def test_a_run_without_an_end_is_an_error(workers) -> None:
    with (
        pytest.raises(WorkerError, match="before their run was complete"),
        workers("if rank == 0: step(0)") as run,
    ):
        list(run.rows())


def test_a_worker_that_stays_after_the_end_is_an_error(
    workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluation.launch._GRACE_S", 0.5)
    body = "if rank == 0: final()\nif rank == 1: time.sleep(300)"
    with pytest.raises(WorkerError, match="did not end"), workers(body) as run:
        list(run.rows())


def test_leaving_the_block_ends_them(workers, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="mine"), workers("time.sleep(300)"):
        give_up = time.monotonic() + 10
        while len(list((tmp_path / "pids").iterdir())) < 4 and time.monotonic() < give_up:
            time.sleep(0.01)
        raise RuntimeError("mine")
