"""Bytes over NCCL: CUDA memory, in stream order."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq.core.errors import TransportError
from dynamiq.transports.exchange import Exchange
from dynamiq.transports.process_group import ProcessGroupTransport, Transfer


class NCCLTransport(ProcessGroupTransport):
    """Batches of one send and one receive on an NCCL group.

    This class follows the documented rules of NCCL and torch; **it has not run on GPUs yet**.

    NCCL has no tags: there is one channel, and a given group carries one transport only. The device
    is the one that is current in :meth:`connect`; payloads elsewhere are copied to it, what arrives
    is on it. Bytes move in the order of the stream that is current in :meth:`post`: the payload
    must be ready there, and what was received may be used there.

    By default a wait does not block the calling thread: it lets that stream wait. The group's
    watchdog then ends a silent wait after ``timeout_s``, by default together with the process
    (``TORCH_NCCL_ASYNC_ERROR_HANDLING``). With ``blocking=True`` the thread waits, and a silent
    peer ends in a :class:`~dynamiq.core.errors.PeerTimeoutError`.

    Attributes:
        blocking: Whether waits block the calling thread.
    """

    backend = "nccl"
    device_type = "cuda"
    channels = 1

    def __init__(
        self,
        group: "dist.ProcessGroup | None" = None,
        *,
        timeout_s: float = 600.0,
        blocking: bool = False,
    ) -> None:
        """Describe the transport; nothing is created before ``connect``.

        Args:
            group: The process group, or None for all ranks of the default group.
            timeout_s: Seconds after which a wait for a silent peer ends in an error.
            blocking: Whether waits block the calling thread.

        Raises:
            InputError: ``timeout_s`` is not positive.
        """
        super().__init__(group, timeout_s=timeout_s)
        self.blocking = blocking

    def _reset(self) -> None:
        super()._reset()
        self._device = torch.device("cuda")
        # A batch is under construction in the group, not in the thread that makes it.
        self._batch = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "blocking": self.blocking}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.blocking = state["blocking"]

    def _check_setup(self) -> None:
        if not (dist.is_available() and dist.is_nccl_available()):
            raise TransportError(
                f"NCCLTransport.connect: torch {torch.__version__} was built without NCCL; install "
                f"a CUDA build, or use GlooTransport"
            )
        if not torch.cuda.is_available():
            raise TransportError(
                "NCCLTransport.connect: torch sees no CUDA device; check the driver and "
                "CUDA_VISIBLE_DEVICES, or use GlooTransport"
            )
        super()._check_setup()

    def _introduce(self, hello: bytes) -> list[bytes]:
        # The first batch of a group hangs unless all ranks take part, so collectives come first.
        self._device = self._current_device()
        hellos = super()._introduce(hello)
        if self._first_tag:
            raise TransportError(
                "NCCLTransport.connect: another transport has used this group, and NCCL cannot "
                "tell their bytes apart; pass group=None or a group of its own"
            )
        return hellos

    def _start(self, group: Any, exchange: Exchange, transfer: Transfer) -> None:
        batch = []
        with self._batch, self._current_stream() as transfer.stream:
            if exchange.nbytes:
                received = torch.empty(exchange.nbytes, dtype=torch.uint8, device=self._device)
                transfer.received = received
                batch.append(_operation(dist.irecv, received, group, exchange.source))
            if exchange.payload is not None:
                sent = transfer.sent = exchange.payload.detach().to(self._device)
                if transfer.stream is not None:
                    # Memory of another stream must not be used again before this one has waited.
                    sent.record_stream(transfer.stream)
                batch.append(_operation(dist.isend, sent, group, exchange.to))
            if batch:
                # In one batch, because a send may block until its peer receives.
                peer = exchange.source if exchange.nbytes else exchange.to
                transfer.works = [(work, peer) for work in dist.batch_isend_irecv(batch)]

    def _wait(self, exchange: Exchange, transfer: Transfer) -> None:
        # The thread that waits may have another current stream than the one that posted.
        with torch.cuda.stream(transfer.stream):
            if self.blocking:
                super()._wait(exchange, transfer)
                return
            for work, peer in transfer.works:
                try:
                    work.wait()
                except Exception as error:  # noqa: BLE001 - backends raise anything
                    self._fail(self._translate(error, exchange, peer), error, exchange.label)

    def _close(self, error: TransportError | None) -> bool:
        if error is None and self._group is not None:
            # Waits were in stream order; giving the group up must not overtake its last bytes.
            self._synchronize()
        return super()._close(error)

    # Everything that needs a CUDA device, so that the rest can be tested without one.

    def _current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @contextlib.contextmanager
    def _current_stream(self) -> Iterator[Any]:
        """The stream in whose order a post works; threads have a current device each."""
        with torch.cuda.device(self._device):
            yield torch.cuda.current_stream()

    def _synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


def _operation(kind: Any, tensor: Tensor, group: Any, peer: int) -> Any:
    return dist.P2POp(kind, tensor, group=group, group_peer=peer)
