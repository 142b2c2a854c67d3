"""What messages cost the thread that encodes, in the driver that runs asynchronous calls."""

import queue
import time
from typing import Any

import torch

from dynamiq.core.collective import Algorithm, Post, Wait
from dynamiq.core.drivers import Interleaved, Job, Meter
from dynamiq.core.transport import Transport
from dynamiq.probe.together import Together

_COUNT = 100
_BYTES = 1024


def thread_s_per_message(transport: Transport, together: Together) -> float:
    """Return the worker thread's processor time to post, await and take up a message; collective.

    Raises:
        TransportError: A peer died or stayed silent.
    """
    payload = torch.zeros(_BYTES, dtype=torch.uint8, device=together.device)
    n, rank = together.world_size, together.rank
    to, source = (rank + 1) % n, (rank - 1) % n

    def exchanges() -> Algorithm[float]:
        began = time.thread_time()
        for _ in range(_COUNT):
            ticket = yield Post(payload, to, source, _BYTES, "probe of messages")
            yield Wait(ticket)
        return (time.thread_time() - began) / _COUNT

    ended: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    driver = Interleaved(transport, "dynamiq-probe")
    driver.submit(Job(exchanges(), 0, None, Meter(), lambda *outcome: ended.put(outcome)))
    seconds, error = ended.get()
    driver.close()
    if error is not None:
        raise error
    return together.largest([seconds])[0]
