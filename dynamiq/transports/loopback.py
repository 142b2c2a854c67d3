"""All ranks in one process, a thread each: for tests, also for those of users."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from dynamiq.core.errors import InputError, PeerTimeoutError, TransportError
from dynamiq.core.transport import Transport
from dynamiq.transports.exchange import Exchange
from dynamiq.transports.lifecycle import Lifecycle


@dataclass(eq=False)
class _Send:
    payload: Tensor
    taken: bool = False


@dataclass(eq=False)
class _Receive:
    payload: Tensor | None = None


@dataclass
class _Box:
    """What is under way from one rank to another on one channel, in order."""

    sends: deque[_Send] = field(default_factory=deque)
    receives: deque[_Receive] = field(default_factory=deque)

    def match(self) -> None:
        while self.sends and self.receives:
            send = self.sends.popleft()
            send.taken = True
            self.receives.popleft().payload = send.payload


class _Wire:
    """What the ranks of one world share; everything in it is read and written under ``changed``."""

    def __init__(self, world_size: int, rendezvous: bool, timeout_s: float) -> None:
        self.world_size = world_size
        self.rendezvous = rendezvous
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int, int], _Box] = defaultdict(_Box)
        self.hellos: dict[int, bytes] = {}
        self.closed: set[int] = set()


class LoopbackTransport(Transport):
    """One rank of a world that lives in one process; make all of them with :meth:`world`.

    Each rank is used by a thread of its own (or by several). Payloads are copied when they are
    posted. What a rank sent before it closed still arrives.

    Example:
        >>> import torch
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from dynamiq.transports import LoopbackTransport
        >>> def swap(transport):
        ...     transport.connect(b"")
        ...     mine = torch.tensor([transport.rank], dtype=torch.uint8)
        ...     peer = 1 - transport.rank
        ...     return transport.post(mine, peer, 1, peer, 0, "swap")().item()
        >>> with ThreadPoolExecutor(2) as threads:
        ...     list(threads.map(swap, LoopbackTransport.world(2)))
        [1, 0]
    """

    channels = 4

    def __init__(self, rank: int, wire: _Wire) -> None:
        """Use :meth:`world` instead; ``wire`` is what the ranks of one world share."""
        self.rank = rank
        self.world_size = wire.world_size
        if wire.rendezvous:
            # One worker that blocks in a send for one call cannot post another call's receive.
            self.channels = 1
        self._wire = wire
        self._lifecycle = Lifecycle()

    @classmethod
    def world(
        cls, world_size: int, *, rendezvous: bool = False, timeout_s: float = 30.0
    ) -> list[Self]:
        """Make the transports of all ranks, by rank.

        Args:
            world_size: Number of ranks, at least 1.
            rendezvous: Whether a send blocks inside ``post`` until its receive is posted, as NCCL
                may do; finds programs that rely on eager sends. There is then one channel.
            timeout_s: Seconds after which a wait for a silent peer ends in an error.

        Raises:
            InputError: An argument is out of range.
        """
        is_known = isinstance(world_size, int) and isinstance(timeout_s, int | float)
        if not is_known or world_size < 1 or not timeout_s > 0:
            raise InputError(
                f"a world has at least one rank and a positive timeout_s, not "
                f"world_size={world_size!r}, timeout_s={timeout_s!r}"
            )
        wire = _Wire(world_size, rendezvous, timeout_s)
        return [cls(rank, wire) for rank in range(world_size)]

    def connect(self, hello: bytes) -> list[bytes]:
        """Wait for all ranks; return every rank's hello. See :class:`Transport`."""
        wire = self._wire
        with wire.changed:
            self._lifecycle.begin(repr(self))
            wire.hellos[self.rank] = bytes(hello)
            wire.changed.notify_all()
            deadline = time.monotonic() + wire.timeout_s
            while missing := [r for r in range(self.world_size) if r not in wire.hellos]:
                if self._lifecycle.closed:
                    raise self._lifecycle.closed_error(f"{self!r}.connect")
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    ranks = ", ".join(map(str, missing))
                    raise self._fail(
                        PeerTimeoutError(
                            f"rank {self.rank} waited {wire.timeout_s:g} s in connect for rank(s) "
                            f"{ranks}: every rank's thread must call connect"
                        )
                    )
                wire.changed.wait(remaining)
            self._lifecycle.open()
            return [wire.hellos[rank] for rank in range(self.world_size)]

    def post(  # noqa: PLR0913 - both halves of an exchange, and where they belong
        self,
        send: Tensor | None,
        to: int,
        nbytes: int,
        source: int,
        channel: int,
        label: str,
        into: Tensor | None = None,
    ) -> Callable[[], Tensor | None]:
        """Register the receive, then send a copy. See :class:`Transport`."""
        exchange = Exchange(self.rank, send, to, nbytes, source, channel, label, into)
        exchange.check(self.world_size, self.channels)
        wire = self._wire
        with wire.changed:
            self._lifecycle.require_open(exchange.label)
            receive = _Receive() if nbytes else None
            if receive is not None:
                box = wire.boxes[source, self.rank, channel]
                box.receives.append(receive)
                box.match()
            sent = None
            if exchange.payload is not None:
                if to in wire.closed:
                    raise self._fail(exchange.lost(to, "it closed its transport"))
                sent = _Send(exchange.payload.detach().clone())
                box = wire.boxes[self.rank, to, channel]
                box.sends.append(sent)
                box.match()
            wire.changed.notify_all()
            if sent is not None and wire.rendezvous:
                self._block_until(lambda: sent.taken, to, exchange)

        def wait() -> Tensor | None:
            if receive is None:
                self._lifecycle.require_open(exchange.label)
                return None
            with wire.changed:
                self._block_until(lambda: receive.payload is not None, source, exchange)
            return self._received(receive, exchange)

        return wait

    def close(self) -> None:
        """Stop; waits of peers for this rank end in an error at once. See :class:`Transport`."""
        self._close(None)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, world_size={self.world_size})"

    def _block_until(self, done: Callable[[], bool], peer: int, exchange: Exchange) -> None:
        """Wait under the lock until ``done``, or raise why that will not happen."""
        wire = self._wire
        deadline = time.monotonic() + wire.timeout_s
        while True:
            self._lifecycle.require_open(exchange.label)
            if done():
                return
            if peer in wire.closed:
                raise self._fail(exchange.lost(peer, "it closed its transport"))
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._fail(exchange.timed_out(peer, wire.timeout_s))
            wire.changed.wait(remaining)

    def _received(self, receive: _Receive, exchange: Exchange) -> Tensor:
        payload = receive.payload
        assert payload is not None
        if payload.numel() != exchange.nbytes:
            raise self._fail(
                TransportError(
                    f"rank {self.rank} expected {exchange.nbytes} bytes from rank "
                    f"{exchange.source}, which sent {payload.numel()} ({exchange}): the ranks "
                    f"disagree about this call"
                )
            )
        return payload if exchange.into is None else exchange.into.copy_(payload)

    def _fail(self, error: TransportError) -> TransportError:
        self._close(error)
        return error

    def _close(self, error: TransportError | None) -> None:
        with self._wire.changed:
            if self._lifecycle.close(error):
                self._wire.closed.add(self.rank)
                self._wire.changed.notify_all()
