"""What transports over torch.distributed share: joining a group, one post, foreign errors."""

import contextlib
import re
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq.core.errors import DynamiqError, InputError, PeerTimeoutError, TransportError
from dynamiq.core.transport import Transport
from dynamiq.transports.exchange import Exchange
from dynamiq.transports.lifecycle import Lifecycle

TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
_LOST = re.compile(r"closed|closure|reset|refused|broken pipe|not connected|abort", re.IGNORECASE)
# Gloo counts in milliseconds and overflows silently.
_LONGEST_S = 1e6
# Gloo's answer to all waits of a process once one of them has timed out.
_COLLATERAL = "Application timeout caused pair closure"
_SOURCE_POSITION = re.compile(r"^\[\S+:\d+\] ")
# How a store says for which rank's address a group waited in vain.
_MISSING_RANK = re.compile(r"keys: [^,]*/(\d+)")

# Stands for a given group in an unpickled transport: a process group cannot travel.
_NOT_PICKLED = object()

# How many transports have used a group so far: each has tags of its own there.
_users_of_group: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()


@dataclass(eq=False)
class Transfer:
    """What one post has started.

    Attributes:
        received: uint8[nbytes] that the receive fills, or None.
        sent: The payload, alive until the send is done.
        works: What to wait for, each with the peer that it depends on.
        stream: The CUDA stream in whose order the bytes move, or None.
    """

    received: Tensor | None = None
    sent: Tensor | None = None
    works: list[tuple[Any, int]] = field(default_factory=list)
    stream: Any = None


class ProcessGroupTransport(Transport):
    """Bytes over a torch process group.

    ``group=None`` means all ranks of the default group, looked up in :meth:`connect`: a transport
    may be built and pickled before ``init_process_group``. It then makes a group of its own, so
    that nothing else can cross its bytes; the same holds when the default group itself is given.
    Any other group is used as it is, with tags of its own.

    Attributes:
        backend: The torch backend that carries the bytes.
        device_type: The devices for which it must be the group's backend.
        timeout_s: Seconds after which a wait for a silent peer ends in an error.
    """

    backend: ClassVar[str]
    device_type: ClassVar[str]

    def __init__(
        self, group: "dist.ProcessGroup | None" = None, *, timeout_s: float = 600.0
    ) -> None:
        """Describe the transport; nothing is created before :meth:`connect`.

        Args:
            group: The process group, or None for all ranks of the default group.
            timeout_s: Seconds after which a wait for a silent peer ends in an error.

        Raises:
            InputError: ``timeout_s`` is not positive.
        """
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= _LONGEST_S:
            raise InputError(
                f"timeout_s must be positive and at most {_LONGEST_S:g}, not {timeout_s!r}"
            )
        self.timeout_s = timeout_s
        self._asked: Any = group
        self._reset()

    def _reset(self) -> None:
        self._group: Any = None
        self._owned = False
        self._first_tag = 0
        # Whatever the backend may still read or write stays alive until it was waited for.
        self._under_way: set[Transfer] = set()
        # By channel, the works of the last wait. Gloo often takes milliseconds if a work is
        # destroyed right after it was waited for (64 bytes there and back: 3.7 ms, not 0.15 ms).
        self._finished: dict[int, list[tuple[Any, int]]] = {}
        self._lifecycle = Lifecycle()

    def connect(self, hello: bytes) -> list[bytes]:
        """Join the group together with all its ranks; return every rank's hello.

        A group of all ranks is created here: every rank of the default group must come, in the
        same order with respect to other groups. See :class:`Transport`.
        """
        self._check_setup()
        self._lifecycle.begin(repr(self))
        try:
            self._owned = self._asked is None or self._asked is dist.group.WORLD
            self._group = self._new_group() if self._owned else self._asked
            self.rank = dist.get_rank(self._group)
            self.world_size = dist.get_world_size(self._group)
            hellos = self._introduce(hello)
        except Exception as error:  # noqa: BLE001 - backends raise anything
            self._fail(self._translate_connect(error), error, f"{self!r}.connect")
        self._lifecycle.open()
        return hellos

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
        """Start the receive, then the send. See :class:`Transport`."""
        self._lifecycle.require_open(label)
        exchange = Exchange(self.rank, send, to, nbytes, source, channel, label, into)
        exchange.check(self.world_size, self.channels)
        group = self._group
        if group is None:  # Another thread has just closed; torch would take the default group.
            raise self._lifecycle.closed_error(label)
        transfer = Transfer()
        self._under_way.add(transfer)
        try:
            self._start(group, exchange, transfer)
        except Exception as error:  # noqa: BLE001 - backends raise anything
            peer = source if nbytes and not transfer.works else to
            self._fail(self._translate(error, exchange, peer), error, label)

        def wait() -> Tensor | None:
            self._lifecycle.require_open(label)
            self._wait(exchange, transfer)
            self._under_way.discard(transfer)
            self._finished[channel] = transfer.works
            transfer.works = []
            transfer.sent = None
            return transfer.received

        return wait

    def close(self) -> None:
        """Stop, and give up a group that was made here. See :class:`Transport`."""
        self._close(None)

    def __getstate__(self) -> dict[str, Any]:
        group_given = self._asked not in (None, dist.group.WORLD)
        return {"timeout_s": self.timeout_s, "group_given": group_given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.timeout_s = state["timeout_s"]
        self._asked = _NOT_PICKLED if state["group_given"] else None
        self._reset()

    def __repr__(self) -> str:
        group = "" if self._asked is None else "group, "
        return f"{type(self).__name__}({group}timeout_s={self.timeout_s:g})"

    @abstractmethod
    def _start(self, group: Any, exchange: Exchange, transfer: Transfer) -> None:
        """Start a checked exchange, the receive first, and note it in ``transfer``."""

    def _wait(self, exchange: Exchange, transfer: Transfer) -> None:
        """Wait for all works of a transfer, within one timeout."""
        deadline = time.monotonic() + self.timeout_s
        for work, peer in transfer.works:
            # Zero would mean the group's own timeout.
            remaining = max(deadline - time.monotonic(), 0.001)
            try:
                work.wait(timedelta(seconds=remaining))
            except Exception as error:  # noqa: BLE001 - backends raise anything
                self._fail(self._translate(error, exchange, peer), error, exchange.label)

    def _interrupt(self, group: Any) -> None:
        """Wake the waits of this process on a group that was made here, and of its peers."""

    def _check_setup(self) -> None:
        """Refuse what can be refused before anything collective."""
        name = type(self).__name__
        if not (dist.is_available() and dist.is_initialized()):
            raise TransportError(
                f"{name}.connect needs torch.distributed, which is not initialised: call "
                f"torch.distributed.init_process_group first"
            )
        if self._asked is None or self._asked is dist.group.WORLD:
            return
        if self._asked is _NOT_PICKLED:
            raise TransportError(
                f"{name}.connect: this transport was made for a given group and then pickled, "
                f"which no process group survives: build it in the process that connects it"
            )
        try:
            rank = dist.get_rank(self._asked)
        except ValueError as error:
            raise TransportError(
                f"{name}.connect: the given group is not known to torch.distributed (any more): "
                f"was it destroyed?"
            ) from error
        if rank < 0:
            raise TransportError(
                f"{name}.connect: rank {dist.get_rank()} of the default group is not in the given "
                f"group; only its members may connect"
            )
        config = dist.get_backend_config(self._asked)
        backends = dict(part.split(":") for part in config.split(","))
        if backends.get(self.device_type) != self.backend:
            raise TransportError(
                f"{name}.connect needs a group with {self.backend} for {self.device_type} tensors, "
                f"the given one has {config}: pass group=None, or a "
                f'torch.distributed.new_group(..., backend="{self.backend}")'
            )

    def _new_group(self) -> Any:
        timeout = timedelta(seconds=self.timeout_s)
        return dist.new_group(backend=self.backend, timeout=timeout, group_desc="dynamiq")

    def _introduce(self, hello: bytes) -> list[bytes]:
        """Exchange hellos by collectives, which also warm the group up for all its ranks.

        In passing the ranks agree on the first tag that no earlier transport uses on this group.
        """
        earlier = _users_of_group.get(self._group, 0)
        facts = self._all_gather(torch.tensor([len(hello), earlier]))
        lengths = [int(fact[0]) for fact in facts]
        earlier = max(int(fact[1]) for fact in facts)
        _users_of_group[self._group] = earlier + 1
        self._first_tag = earlier * self.channels
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(hello)] = torch.tensor(list(hello), dtype=torch.uint8)
        rows = self._all_gather(padded)
        return [bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)]

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.to(self.device_type)
        rows = [torch.empty_like(tensor) for _ in range(self.world_size)]
        work: Any = dist.all_gather(rows, tensor, group=self._group, async_op=True)
        work.wait(timedelta(seconds=self.timeout_s))
        return [row.cpu() for row in rows]

    def _translate(self, error: Exception, exchange: Exchange, peer: int) -> DynamiqError:
        """Say in dynamiq's words what a backend's error means for an exchange with ``peer``."""
        reason = _reason(error)
        if _COLLATERAL in reason:
            # The wait that did time out knows the peer; its thread may report a little later.
            self._lifecycle.wait_until_closed(1.0)
        if self._lifecycle.closed:
            return self._lifecycle.closed_error(exchange.label)
        if TIMED_OUT.search(reason) and _COLLATERAL not in reason:
            return exchange.timed_out(peer, self.timeout_s)
        if _LOST.search(reason):
            return exchange.lost(peer, reason)
        return TransportError(f"{exchange}: {type(error).__name__}: {reason}")

    def _translate_connect(self, error: Exception) -> DynamiqError:
        if isinstance(error, DynamiqError):
            return error
        reason = _reason(error)
        if not TIMED_OUT.search(reason):
            return TransportError(f"{self!r}.connect: {type(error).__name__}: {reason}")
        missing = _MISSING_RANK.search(reason)
        return self._nobody_came(f"rank {missing[1]}" if missing else "the other ranks", reason)

    def _nobody_came(self, whom: str, reason: str) -> PeerTimeoutError:
        return PeerTimeoutError(
            f"{self!r}.connect waited up to {self.timeout_s:g} s for {whom}: every rank of the "
            f"group must connect its transport, in the same order ({reason})"
        )

    def _fail(self, error: DynamiqError, cause: Exception, what: str) -> NoReturn:
        """Close the transport if ``error`` says so, and raise it as the outcome of ``what``."""
        if isinstance(error, TransportError):
            if not self._close(error):
                # Waits of several threads failed together: the one that closed it speaks for all.
                raise self._lifecycle.closed_error(what)
            if error is not cause:
                raise error from cause
        raise error

    def _close(self, error: TransportError | None) -> bool:
        """Close for good; return whether this call did it."""
        if not self._lifecycle.close(error):
            return False
        group, self._group = self._group, None
        if group is None or not self._owned:
            return True
        if error is not None or self._under_way:
            self._interrupt(group)
        # It is gone already if the default group, and all others with it, was destroyed before.
        with contextlib.suppress(ValueError, AssertionError):
            dist.destroy_process_group(group)
        # A work that lives keeps the connections of its group open.
        self._under_way.clear()
        self._finished.clear()
        return True


def _reason(error: Exception) -> str:
    """What a backend says, without its source positions, stack traces and advice."""
    line = str(error).strip().split("\n", 1)[0]
    return _SOURCE_POSITION.sub("", line).split(". ", 1)[0]
