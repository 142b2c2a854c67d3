"""run_ranks: results come back, and whatever a rank does, the test ends and says why."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests import processes
from tests.processes import RankError, run_ranks


def sum_of_ranks(rank, offset):
    x = torch.tensor([rank + offset])
    dist.all_reduce(x)
    return x.item(), os.getpid()


def do(rank, what):
    if rank != 1:
        return rank
    if what == "raise":
        raise ValueError("rank one does not like this")
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)
    return None


def test_results_come_by_rank():
    assert [total for total, _ in run_ranks(sum_of_ranks, 3, 10)] == [33, 33, 33]


def test_processes_are_used_again():
    first, second = (run_ranks(sum_of_ranks, n, 0) for n in (3, 2))

    assert [pid for _, pid in second] == [pid for _, pid in first[:2]]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("raise", r"(?s)rank 1 of 3 in do:.*ValueError: rank one does not like this"),
        ("die", "rank 1 of 3 in do:\nthe process ended with exit code -9"),
        ("stop", r"rank 1 of 3 in do:\nno answer"),
        ("sleep", r"(?s)rank 1 of 3 in do:\nno answer \(limit 2 s\).*test_processes\.py.* in do"),
    ],
)
def test_a_rank_that_fails_is_reported(what, message):
    with pytest.raises(RankError, match=message):
        run_ranks(do, 3, what, timeout_s=30 if what in ("raise", "die") else 2)
    assert run_ranks(sum_of_ranks, 3, 0)[0][0] == 3


@pytest.mark.parametrize("what", ["die", "stop", "sleep"])
def test_a_rank_may_be_lost(what):
    assert run_ranks(do, 3, what, timeout_s=30, lost={1}) == [0, None, 2]
    assert run_ranks(sum_of_ranks, 3, 0)[0][0] == 3


def barrier_without_rank_0(rank):
    if rank == 0:
        raise ValueError("the first to fail")
    dist.barrier()


def test_the_others_have_a_grace_time(monkeypatch):
    monkeypatch.setattr(processes, "GRACE_S", 0.5)
    began = time.monotonic()

    with pytest.raises(RankError, match="the first to fail"):
        run_ranks(barrier_without_rank_0, 3)

    assert time.monotonic() - began < 10
