"""Gradients of some ranks, and how a call on them is run: as it is, all ranks and all chunks."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from dynamiq.core.compressor import Compressor
from dynamiq.core.message import Call
from dynamiq.core.metrics import simulate
from dynamiq.core.topology import Topology
from dynamiq.simulation.figures import Target
from dynamiq.simulation.observed import Log, Observed

WATCHED_CHUNKS = 8
"""So many chunks, at most, have their messages measured: they are dealt like cards, all alike."""


@dataclass(frozen=True)
class Attempt:
    """How a case is tried.

    Attributes:
        seed: Of the rounding.
        warm_up_calls: Calls with the same gradients before, if the format learns from them.
        watch: Whether to measure what messages lose.
        order: Which order the ranks are in: 0 as they are, any other number a random one.
    """

    seed: int = 0
    warm_up_calls: int = 0
    watch: bool = False
    order: int = 0


@dataclass(frozen=True)
class Trial:
    """What one call gave.

    Attributes:
        estimate: float32[d], the sum that all ranks end with.
        bits_per_entry: As in :class:`dynamiq.core.metrics.Simulated`.
        bytes_per_rank: Sent by the mean rank.
        log: The encoding, and the messages if they were watched.
    """

    estimate: Tensor
    bits_per_entry: float
    bytes_per_rank: float
    log: Log


class World(Protocol):
    """Gradients of some ranks, and how a call on them is run."""

    @property
    def world_size(self) -> int:
        """Ranks."""

    @property
    def numel(self) -> int:
        """Entries of one rank."""

    @property
    def one_chunk(self) -> bool:
        """Whether one chunk stands for all."""

    @property
    def target(self) -> Target:
        """What a call should give; known after the first one at the latest."""

    def run(self, compressor: Compressor, topology: Topology, attempt: Attempt) -> Trial:
        """Run one call."""


@dataclass(frozen=True)
class AllChunks:
    """The entries of all ranks: float32[n, d]; a call is exactly a real one."""

    gradients: Tensor
    one_chunk: bool = False

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.gradients.shape[0]

    @property
    def numel(self) -> int:
        """Entries of one rank."""
        return self.gradients.shape[1]

    @cached_property
    def target(self) -> Target:
        """The exact sum."""
        return Target.of(self.gradients)

    def run(self, compressor: Compressor, topology: Topology, attempt: Attempt) -> Trial:
        """Run a call as it is; of the messages, those of a few chunks are watched."""
        x, seed, states = self._in_order(attempt.order), attempt.seed, None
        earlier = attempt.warm_up_calls if compressor.stateful else 0
        for number in range(earlier):
            states = simulate(x, compressor, topology, Call(seed, number), states).states
        log = Log(range(min(self.world_size, WATCHED_CHUNKS) if attempt.watch else 0))
        watched = Observed.by(compressor, log)
        ended = simulate(x, watched, topology, Call(seed, earlier), states)
        if attempt.watch:
            squares = self.target.total.square()
            log.energy = sum(squares[at].sum().item() for at in log.places.values())
        sent = sum(ended.bytes_sent) / self.world_size
        return Trial(ended.result, ended.bits_per_entry, sent, log)

    def _in_order(self, order: int) -> Tensor:
        if order == 0:
            return self.gradients
        generator = torch.Generator().manual_seed(order)
        return self.gradients[torch.randperm(self.world_size, generator=generator)]
