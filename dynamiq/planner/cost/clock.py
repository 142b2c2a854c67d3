"""Runs one rank's step: a thread that encodes, links, and a backward pass beside it.

All ranks do the same at the same time, so what a rank receives was posted when it posted. The
thread takes what is ready in the order in which it became so, as ``core.drivers.Interleaved`` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamiq.planner.cost.program import Block


@dataclass(frozen=True)
class Job:
    """One call.

    Attributes:
        ready_s: When it may begin, as the backward pass goes when it is alone.
        blocks: What it does.
        times: Of how many such calls, one after the other, it has the work and the bytes.
    """

    ready_s: float
    blocks: Sequence[Block]
    times: int = 1


@dataclass(frozen=True)
class Elapsed:
    """How a step went.

    Attributes:
        end_s: When backward pass and calls have ended, from the beginning of the former.
        backward_s: When the backward pass has ended.
        worked_s: How long the thread was busy, waiting for its turn included.
        sending_s: How long the busiest link was.
    """

    end_s: float
    backward_s: float
    worked_s: float
    sending_s: float


@dataclass
class _Running:
    job: Job
    channel: int
    due_s: float
    at: int = 0
    has_waited: bool = False
    arrivals: dict[int, float] = field(default_factory=dict)


class Clock:
    """The thread's time, and how far the backward pass has come."""

    def __init__(self, backward_s: float, share: float) -> None:
        """Begin.

        Args:
            backward_s: How long the backward pass takes alone.
            share: How fast each goes while the thread and the backward pass both work; 1 if each
                has a processor.
        """
        self.now = 0.0
        self.lag = 0.0
        self.worked_s = 0.0
        self._backward_s = backward_s
        self._share = share

    def work(self, seconds: float) -> None:
        """Let the thread work for what takes so long alone."""
        began, share = self.now, self._share
        left = self._backward_s - (self.now - self.lag)
        if share < 1.0 and left > 0.0:
            together = min(seconds, left) / share
            self.lag += (1.0 - share) * together
            self.now += together
            seconds -= together * share
        self.now += seconds
        self.worked_s += self.now - began

    def when(self, ready_s: float) -> float:
        """Return when the backward pass comes to a point if the thread stays idle."""
        return ready_s + self.lag


def run(jobs: Sequence[Job], backward_s: float, share: float, channels: int) -> Elapsed:
    """Run a step.

    Args:
        jobs: In the order in which they become ready.
        backward_s: As for :class:`Clock`.
        share: As for :class:`Clock`.
        channels: Calls in flight at once; call i has channel i mod channels.
    """
    clock, free, busy = Clock(backward_s, share), [0.0, 0.0], [0.0, 0.0]
    running: list[_Running] = []
    freed = [0.0] * channels
    taken = [False] * channels
    waiting = 0
    while running or waiting < len(jobs):
        first = min(running, key=lambda r: r.due_s) if running else None
        channel = waiting % channels
        if waiting < len(jobs) and not taken[channel]:
            start = max(clock.when(jobs[waiting].ready_s), freed[channel])
            if first is None or start < first.due_s:
                first = _Running(jobs[waiting], channel, due_s=start)
                running.append(first)
                taken[channel] = True
                waiting += 1
        assert first is not None
        clock.now = max(clock.now, first.due_s)
        if not _advance(first, clock, free, busy):
            running.remove(first)
            freed[first.channel], taken[first.channel] = clock.now, False
    backward = backward_s + clock.lag
    return Elapsed(max(clock.now, backward), backward, clock.worked_s, max(busy))


def _advance(call: _Running, clock: Clock, free: list[float], busy: list[float]) -> bool:
    """Do what a call does up to its next wait, and note when that ends; return whether it waits.

    What came long ago still waits for its turn.
    """
    blocks, times = call.job.blocks, call.job.times
    while call.at < len(blocks):
        block = blocks[call.at]
        if block.wait is not None and not call.has_waited:
            call.due_s = max(call.arrivals.pop(block.wait), clock.now)
            call.has_waited = True
            return True
        call.has_waited = False
        clock.work(block.before_s * times)
        post = block.post
        if post is not None:
            occupied = post.occupied_s * times
            free[post.link] = max(free[post.link], clock.now) + occupied
            busy[post.link] += occupied
            call.arrivals[call.at] = free[post.link] + post.delay_s * times
        clock.work(block.after_s * times)
        call.at += 1
    return False
