"""Competing traffic: connections that send all they can over the links of a run."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from evaluation.interruption import uninterrupted
from evaluation.network import Hosts

_PROBE = [sys.executable, "-S", str(Path(__file__).parents[1] / "link_probe.py")]


@contextmanager
def competing(hosts: Hosts, flows: int) -> Iterator[None]:
    """Have every host send over ``flows`` TCP connections to the next one, until the block ends."""
    with ExitStack() as stack:
        for rank in range(hosts.world_size if flows else 0):
            receiver = (rank + 1) % hosts.world_size
            address = hosts.address(receiver)
            stack.enter_context(_running(hosts, receiver, "drain", address))
            stack.enter_context(_running(hosts, rank, "flood", address, str(flows)))
        yield


@contextmanager
def _running(hosts: Hosts, rank: int, *words: str) -> Iterator[None]:
    process = subprocess.Popen(
        hosts.command(rank, [*_PROBE, *words]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        with uninterrupted():
            process.kill()
            process.wait()
