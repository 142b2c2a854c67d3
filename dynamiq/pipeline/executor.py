"""Runs a pipeline's calls in order, and closes it at the first failure."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynamiq.core.collective import Algorithm
from dynamiq.core.drivers import Interleaved, Job, Meter, blocking
from dynamiq.core.errors import ClosedError, DynamiqError, InputError
from dynamiq.core.transport import Transport
from dynamiq.pipeline.handle import Handle


class Executor:
    """In the caller's thread until the first asynchronous call, in a worker thread from then on.

    A failure during communication closes the transport: peers are waiting in the middle of a
    call, and nothing later could be trusted.
    """

    def __init__(self, transport: Transport) -> None:
        """Start nothing yet."""
        self._transport = transport
        self._worker: Interleaved | None = None
        self._error: BaseException | None = None

    def check_open(self) -> None:
        """Raise the first failure again, or ClosedError after :meth:`close`."""
        if isinstance(self._error, Exception):
            raise self._error.with_traceback(None)  # each raise would add to it
        if self._error is not None:
            raise ClosedError(
                f"the pipeline was closed when {type(self._error).__name__} interrupted a call; "
                f"build a new one, with a new transport"
            ) from self._error

    def check_may_block(self) -> None:
        """Raise InputError in the worker thread, which would wait for itself."""
        if self._worker is not None and self._worker.is_this_thread():
            raise InputError(
                "a blocking collective was called inside a callback of a call's future, in the "
                "thread that runs all calls; use async_op=True there"
            )

    def run(
        self,
        algorithm: Algorithm[Tensor | DynamiqError],
        number: int,
        key: str | None,
        conclude: Callable[[Any, Meter], None],
        *,
        background: bool,
    ) -> Handle:
        """Run an algorithm on the channel of its call number.

        Args:
            algorithm: Returns the result; or an error, with which the call has ended on every
                rank alike, so that nothing needs to be closed.
            number: The call number.
            key: Calls with the same key never overlap.
            conclude: Called with the result and the meter before the handle ends.
            background: Return before the call has ended.
        """
        handle = Handle(self.check_may_block)
        meter = Meter()

        def finish(result: Any, error: BaseException | None) -> None:
            if error is None:
                try:
                    conclude(result, meter)
                except Exception as unexpected:  # noqa: BLE001 - raised where the handle is awaited
                    error = unexpected
            if error is not None:
                self.fail(error)
            elif isinstance(result, DynamiqError):
                error = result
            handle.finish(None if error is not None else result, error)

        if background and self._worker is None:
            self._worker = Interleaved(self._transport, "dynamiq")
        channel = number % self._transport.channels
        job = Job(algorithm, channel, key, meter, finish)
        if self._worker is not None:
            self._worker.submit(job)
        else:
            _run_here(job, self._transport)
        return handle

    def fail(self, error: BaseException) -> None:
        """Close the transport; later calls raise this error again."""
        self._error = self._error or error
        self._transport.close()

    def refuse(self) -> None:
        """Take no more calls; those in flight go on."""
        if self._error is None:
            self._error = ClosedError(
                "the pipeline is closed; build a new one, with a new transport"
            )

    def abort(self, error: BaseException) -> None:
        """End calls in flight, and refuse later ones, with an error."""
        if self._worker is not None:
            self._worker.abort(error)
        self.fail(error)

    def abandon(self) -> None:
        """End the worker once its calls have ended, without waiting for that."""
        if self._worker is not None:
            self._worker.stop()

    def close(self) -> None:
        """Wait for calls in flight, then end the worker; idempotent."""
        self.refuse()
        if self._worker is not None:
            self._worker.close()


def _run_here(job: Job, transport: Transport) -> None:
    result: Any = None
    failure: BaseException | None = None
    try:
        with torch.no_grad():
            result = blocking(job.algorithm, transport, job.channel, job.meter)
    except BaseException as error:  # noqa: BLE001 - raised where the handle is awaited
        failure = error
    job.finish(result, failure)
