"""How bytes move between ranks: one verb."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor


class Transport(ABC):
    """A group of ranks that can exchange bytes.

    Attributes:
        rank: This rank within the group; known after :meth:`connect`.
        world_size: Ranks in the group; known after :meth:`connect`.
        channels: How many calls may be in flight at once, each on a channel of its own.
    """

    rank: int
    world_size: int
    channels: int

    @abstractmethod
    def connect(self, hello: bytes) -> list[bytes]:
        """Create what is needed, together with all ranks; return every rank's hello.

        Collective, called once, in the caller's thread. ``hello`` may differ in length.

        Raises:
            TransportError: The group cannot be joined; the message says what to do.
        """

    @abstractmethod
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
        """Start receiving ``nbytes`` from ``source``, then sending ``send`` to ``to``.

        FIFO per (peer, channel). An absent payload is neither sent nor awaited. ``send`` must not
        be written before the returned function was called; that function waits for both and
        returns the received uint8[nbytes], or None if nbytes is 0. ``into``, uint8[nbytes] on the
        CPU, is memory that may be used for them; it, too, must be left alone until then.

        On CUDA the bytes may be used on the stream that was current here.

        Raises:
            InputError: A peer or channel does not exist, or the payload is not uint8[m].
            PeerLostError: A connection broke (also from the returned function).
            PeerTimeoutError: Nothing moved within the timeout; names the peer waited for.
            ClosedError: The transport was closed, by the user or after an error.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop using the group, for good; idempotent.

        Waits of this rank end in ClosedError; waits of peers for it may end in PeerLostError.
        """
