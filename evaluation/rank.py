"""One rank of a run, seen from inside its process: its orders, its rows and its group."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist

from evaluation.interruption import end_with
from evaluation.records import DistributedPlan, Seat, WorkerConfig

P = TypeVar("P", bound=DistributedPlan)


def orders(kind: type[WorkerConfig[P]], prog: str, description: str | None) -> WorkerConfig[P]:
    """Return what the launcher wants, and end this process when the launcher dies."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--config", required=True, help="a WorkerConfig as JSON")
    config = kind.model_validate_json(parser.parse_args().config)
    end_with(config.seat.launcher_pid)
    torch.set_num_threads(1)
    return config


def claim_stdout() -> TextIO:
    """Return the standard output for rows alone; every other print now goes to stderr."""
    rows = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return rows


@contextmanager
def process_group(seat: Seat, world_size: int) -> Iterator[None]:
    """Be in the default group, over Gloo."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{seat.address}:{seat.port}",
        rank=seat.rank,
        world_size=world_size,
        timeout=timedelta(seconds=seat.timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
