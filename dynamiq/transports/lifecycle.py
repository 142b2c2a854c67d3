"""A transport connects once, works, and is closed for good by the user or by its first error."""

import threading

from dynamiq.core.errors import ClosedError, TransportError


class Lifecycle:
    """Where one transport is in its life; usable from several threads.

    Attributes:
        first_error: The error that closed the transport, if one did.
    """

    def __init__(self) -> None:
        self.first_error: TransportError | None = None
        self._lock = threading.Lock()
        self._begun = False
        self._open = False
        self._closed = threading.Event()

    @property
    def closed(self) -> bool:
        """Whether the transport was closed, by the user or by an error."""
        return self._closed.is_set()

    def wait_until_closed(self, seconds: float) -> bool:
        """Wait at most so long for the end; return whether it came."""
        return self._closed.wait(seconds)

    def begin(self, owner: str) -> None:
        """Note that ``connect`` was called.

        Raises:
            ClosedError: The transport was closed.
            TransportError: It was called before.
        """
        with self._lock:
            if self.closed:
                raise self.closed_error(f"{owner}.connect")
            if self._begun:
                raise TransportError(f"{owner} is connected already; connect is called once")
            self._begun = True

    def open(self) -> None:
        """Note that ``connect`` succeeded."""
        self._open = True

    def require_open(self, what: str) -> None:
        """Refuse ``what`` unless the transport is connected and not closed.

        Raises:
            ClosedError: It was closed; the error that closed it is the cause.
            TransportError: It was never connected.
        """
        if self.closed:
            raise self.closed_error(what)
        if not self._open:
            raise TransportError(f"{what}: the transport is not connected; call connect first")

    def close(self, error: TransportError | None = None) -> bool:
        """Close for good, keeping the first error; return whether this call did it."""
        with self._lock:
            if self.closed:
                return False
            self.first_error = error
            self._closed.set()
            return True

    def closed_error(self, what: str) -> ClosedError:
        """The error for an operation after the end, with the first error as its cause."""
        if self.first_error is None:
            return ClosedError(f"{what}: the transport was closed before")
        error = ClosedError(f"{what}: the transport was closed by an error: {self.first_error}")
        error.__cause__ = self.first_error
        return error
