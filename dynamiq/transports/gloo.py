"""Bytes over Gloo: CPU memory and TCP."""

import contextlib
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq.transports.exchange import Exchange
from dynamiq.transports.process_group import TIMED_OUT, ProcessGroupTransport, Transfer

# "dynq" as a number: far from the small tags that others use on a shared group.
_FIRST_TAG = 0x64796E71
# How rank 0's barrier says who stayed away.
_MISSING_RANKS = re.compile(r"Ranks ([\d, ]+) failed to pass")


class GlooTransport(ProcessGroupTransport):
    """Point-to-point messages of a Gloo group, with one tag per channel.

    A payload on another device is copied to the CPU first; what arrives is a CPU tensor.

    A rank that fails closes its connections, so peers that wait for it hear at once
    (:class:`~dynamiq.core.errors.PeerLostError`). On a given group only a timeout closes them;
    after any other error its peers time out.

    Example::

        transport = GlooTransport(timeout_s=60)
        dist.init_process_group("gloo")
        hellos = transport.connect(b"rank zero says hello")
        received = transport.post(payload, right, nbytes, left, 0, "shift")()
    """

    backend = "gloo"
    device_type = "cpu"
    channels = 4

    def _new_group(self) -> Any:
        with _considerate_threads():
            return super()._new_group()

    def _introduce(self, hello: bytes) -> list[bytes]:
        # Other collectives do not say who is missing. A group of several backends has no such
        # barrier.
        if dist.get_backend(self._group) == self.backend:
            timeout = timedelta(seconds=self.timeout_s)
            try:
                dist.monitored_barrier(self._group, timeout, wait_all_ranks=True)
            except RuntimeError as error:
                missing = _MISSING_RANKS.search(str(error))
                whom = f"rank(s) {missing[1]}" if missing else "ranks that rank 0's error names"
                raise self._nobody_came(whom, str(error).split("\n", 1)[0]) from error
        return super()._introduce(hello)

    def _start(self, group: Any, exchange: Exchange, transfer: Transfer) -> None:
        tag = _FIRST_TAG + self._first_tag + exchange.channel
        if exchange.nbytes:
            # Before the send: two ranks that send first to each other get half the rate.
            into = exchange.into
            transfer.received = _host_memory(exchange.nbytes) if into is None else into
            work = dist.irecv(transfer.received, group=group, tag=tag, group_src=exchange.source)
            transfer.works.append((work, exchange.source))
        if exchange.payload is not None:
            transfer.sent = _on_host(exchange.payload.detach())
            work = dist.isend(transfer.sent, group=group, tag=tag, group_dst=exchange.to)
            transfer.works.append((work, exchange.to))

    def _interrupt(self, group: Any) -> None:
        # Aborting a Gloo group wakes nobody, and destroying it closes no connection while a wait
        # is under way. But a receive that times out makes Gloo close all of them. One from a peer
        # that is gone fails at once, and closes nothing.
        nothing = torch.empty(1, dtype=torch.uint8)
        for distance in range(1, self.world_size):
            peer = (self.rank + distance) % self.world_size
            try:
                work: Any = dist.irecv(nothing, group=group, tag=_FIRST_TAG - 1, group_src=peer)
                work.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if TIMED_OUT.search(str(error)):
                    return


@contextlib.contextmanager
def _considerate_threads() -> Iterator[None]:
    """Let threads that are started inside not preempt others when they wake.

    Gloo's thread spins while another thread holds the lock of a connection. If it has just
    preempted that thread, it does so for a whole time slice. Where ranks share processors, half
    of the processor time of small calls goes that way (docs/design/bench.md).
    """
    batch = getattr(os, "SCHED_BATCH", None)
    if batch is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    nothing = os.sched_param(0)
    try:
        os.sched_setscheduler(0, batch, nothing)
    except OSError:  # a sandbox that forbids it
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, nothing)


def _on_host(payload: Tensor) -> Tensor:
    return payload if payload.is_cpu else _host_memory(payload.numel()).copy_(payload)


def _host_memory(nbytes: int) -> Tensor:
    """Allocate memory that a process which uses CUDA copies to and from its device directly."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())
