"""Three ways to run the collective's generator: lockstep, blocking and interleaved."""

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynamiq.core.collective import Algorithm, Post, Request, Wait
from dynamiq.core.errors import AgreementError, ClosedError, TransportError
from dynamiq.core.transport import Transport

T = TypeVar("T")


@dataclass
class Meter:
    """What one rank's algorithms did.

    Attributes:
        bytes_sent: Payload, statistics and header bytes sent.
        bytes_received: The same received.
        codec_s: Seconds between requests: statistics, encoding, accumulation.
        wire_s: Seconds in which a wait was blocked.
        node_bytes_sent: Those of ``bytes_sent`` that stayed inside a node.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    codec_s: float = 0.0
    wire_s: float = 0.0
    node_bytes_sent: int = 0

    def count(self, post: Post) -> None:
        """Add the bytes of a post."""
        sent = 0 if post.payload is None else post.payload.numel()
        self.bytes_sent += sent
        self.node_bytes_sent += sent if post.link == "node" else 0
        self.bytes_received += post.nbytes

    def add(self, other: "Meter") -> None:
        """Add another meter's figures."""
        self.bytes_sent += other.bytes_sent
        self.bytes_received += other.bytes_received
        self.codec_s += other.codec_s
        self.wire_s += other.wire_s
        self.node_bytes_sent += other.node_bytes_sent


def lockstep(algorithms: Sequence[Algorithm[T]], meters: Sequence[Meter] | None = None) -> list[T]:
    """Run one algorithm per rank in this thread, delivering bytes in memory.

    Returns:
        What each algorithm returned, by rank.

    Raises:
        AgreementError: All ranks wait for bytes that nobody will send.
    """
    meters = meters or [Meter() for _ in algorithms]
    mail: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    waiting: dict[int, Wait] = {}
    results: dict[int, T] = {}

    def advance(rank: int, value: Any) -> None:
        try:
            request: Request = algorithms[rank].send(value)
            while isinstance(request, Post):
                meters[rank].count(request)
                if request.payload is not None and request.payload.numel():
                    mail[rank, request.to].append(request.payload.clone())
                request = algorithms[rank].send(request)
            waiting[rank] = request
        except StopIteration as end:
            results[rank] = end.value

    for rank in range(len(algorithms)):
        advance(rank, None)
    while waiting:
        blocked = len(waiting)
        for rank in list(waiting):
            post: Post = waiting[rank].ticket
            source, nbytes = post.source, post.nbytes
            box = mail[source, rank]
            if nbytes and not box:
                blocked -= 1
                continue
            del waiting[rank]
            if nbytes and box[0].numel() != nbytes:
                raise AgreementError(
                    f"rank {rank} expects {nbytes} bytes from rank {source}, which sent "
                    f"{box[0].numel()}"
                )
            received = box.popleft() if nbytes else None
            if received is not None and post.into is not None:
                received = post.into.copy_(received)
            advance(rank, received)
        if not blocked:
            peers = {rank: wait.ticket.source for rank, wait in waiting.items()}
            raise AgreementError(f"ranks wait for peers that send nothing (rank: peer): {peers}")
    unread = {f"{source} to {to}": len(box) for (source, to), box in mail.items() if box}
    if unread:
        raise AgreementError(f"payloads were sent that nobody awaited (ranks: count): {unread}")
    return [results[rank] for rank in range(len(algorithms))]


def blocking(algorithm: Algorithm[T], transport: Transport, channel: int, meter: Meter) -> T:
    """Run one rank's algorithm over a transport in the calling thread."""
    value: Any = None
    try:
        while True:
            request = _resume(algorithm, value, meter)
            if isinstance(request, Post):
                value = _post(request, transport, channel, meter)
            else:
                began = time.perf_counter()
                value = request.ticket()
                meter.wire_s += time.perf_counter() - began
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def _resume(algorithm: Algorithm[Any], value: Any, meter: Meter) -> Request:
    began = time.perf_counter()
    try:
        return algorithm.send(value)
    finally:
        meter.codec_s += time.perf_counter() - began


def _post(
    post: Post, transport: Transport, channel: int, meter: Meter
) -> Callable[[], Tensor | None]:
    meter.count(post)
    return transport.post(
        post.payload, post.to, post.nbytes, post.source, channel, post.label, post.into
    )


@dataclass
class Job:
    """One algorithm on one channel, and whom to tell how it ended.

    Attributes:
        algorithm: What to run.
        channel: No two jobs run on a channel at once.
        key: No two jobs run with a key at once, so that one's state is the next one's; None for
            jobs without state.
        meter: Where bytes and seconds are counted.
        finish: Called in the worker with the result, or with None and the error.
    """

    algorithm: Algorithm[Any]
    channel: int
    key: str | None
    meter: Meter
    finish: Callable[[Any, BaseException | None], None]


class Interleaved:
    """A worker thread that runs several jobs at once, each on a channel of its own.

    Jobs start in the order of submission, as soon as their channel is free. Encoding happens in
    the worker only; one thread per channel waits for bytes, since process groups offer no way to
    ask whether a receive has completed. Whatever is ready goes on, so ranks that proceed at
    different speeds cannot wait for each other in a circle. The first error ends every job, the
    later ones included.
    """

    def __init__(self, transport: Transport, name: str) -> None:
        """Start the threads."""
        self._transport = transport
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pending: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self._waits: list[queue.SimpleQueue[tuple[Job, Wait] | None]] = [
            queue.SimpleQueue() for _ in range(transport.channels)
        ]
        self._error: BaseException | None = None
        self._closing = False
        self._idle_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        for i, waits in enumerate(self._waits):
            wait_name = f"{name}-wait-{i}"
            threading.Thread(target=self._wait, args=(waits,), name=wait_name, daemon=True).start()

    def is_this_thread(self) -> bool:
        """Return whether the caller runs in the worker."""
        return threading.current_thread() is self._thread

    def submit(self, job: Job) -> None:
        """Queue a job."""
        self._events.put(lambda: self._pending.append(job))

    def abort(self, error: BaseException) -> None:
        """End all jobs with an error, as if one of them had failed."""
        self._events.put(lambda: self._fail(error))

    def stop(self) -> None:
        """End the threads once all submitted jobs have ended."""
        self._events.put(lambda: setattr(self, "_closing", True))

    def close(self) -> None:
        """End the threads once all submitted jobs have ended, and wait for that."""
        self.stop()
        if not self.is_this_thread():
            self._thread.join()

    def _run(self) -> None:
        with torch.no_grad():
            while not self._closing or self._running or self._pending:
                began = time.perf_counter()
                event = self._events.get()
                self._idle_s = time.perf_counter() - began
                event()
                del event  # it holds a job's tensors, and the next may be long in coming
                self._start_pending()
        for waits in self._waits:
            waits.put(None)

    def _start_pending(self) -> None:
        while self._pending:
            keys = {job.key for job in self._running.values()} - {None}
            job = self._pending[0]
            if job.channel in self._running or job.key in keys:
                return
            self._pending.popleft()
            if self._error is not None:
                job.finish(None, self._error)
                continue
            self._running[job.channel] = job
            self._advance(job, None)

    def _resume(self, job: Job, value: Any, error: BaseException | None) -> None:
        if self._running.get(job.channel) is not job:
            return  # it has failed with another job in the meantime
        job.meter.wire_s += self._idle_s
        if error is not None:
            self._fail(error)
        else:
            self._advance(job, value)

    def _advance(self, job: Job, value: Any) -> None:
        """Resume a job and carry out its requests up to its next wait."""
        try:
            while not isinstance(request := _resume(job.algorithm, value, job.meter), Wait):
                value = _post(request, self._transport, job.channel, job.meter)
            self._waits[job.channel].put((job, request))
        except StopIteration as end:
            del self._running[job.channel]
            job.finish(end.value, None)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the job
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if isinstance(error, ClosedError) and isinstance(error.__cause__, TransportError):
            error = error.__cause__  # another wait has just broken the transport, and says why
        self._error = self._error or error
        self._transport.close()
        for job in self._running.values():
            job.algorithm.close()
            job.finish(None, self._error)
        self._running.clear()

    def _wait(self, waits: "queue.SimpleQueue[tuple[Job, Wait] | None]") -> None:
        while (item := waits.get()) is not None:
            job, wait = item
            value, failure = None, None
            try:
                value = wait.ticket()
            except BaseException as error:  # noqa: BLE001 - raised again where the job is awaited
                failure = error
            self._events.put(partial(self._resume, job, value, failure))
            del item, job, wait, value, failure  # as above
