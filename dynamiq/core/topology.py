"""Who sends which chunk to whom, and when: pure data, computed for one rank at a time.

A topology is a description with two pure functions; a :class:`Schedule` binds it to a world
size. Nothing here knows tensors.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property

from dynamiq.core.description import Description
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.message import Message


@dataclass(frozen=True, slots=True)
class Hop:
    """One class of messages: all those whose payload sums the same number of ranks.

    Attributes:
        summed: Ranks in the partial sum.
        transfers: How often one chunk crosses a link in this class.
        reduce: True in the reduce-scatter, False in the all-gather.
    """

    summed: int
    transfers: int
    reduce: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank does in one round: send to one peer while receiving from one peer.

    Attributes:
        to: Peer that takes ``sends`` (group rank).
        sends: Messages sent, in wire order.
        source: Peer that brings ``receives`` (group rank).
        receives: Messages received, in wire order.
        reduce: True in the reduce-scatter, False in the all-gather.
        link: Name of the kind of link crossed: "network", or "node" if the bytes stay inside one.
    """

    to: int
    sends: tuple[Message, ...]
    source: int
    receives: tuple[Message, ...]
    reduce: bool
    link: str = "network"


class Topology(Description, ABC):
    """Schedules for every world size.

    The contract, checked for all topologies by enumeration:

    * rank r ends the reduce-scatter with the complete chunk r (FSDP gives rank r slice r);
    * each rank compresses each chunk at most once, so (sender, chunk) addresses a payload;
    * a chunk is sent only after everything this rank receives for it has been added;
    * message ``hop`` is the index of the entry of :meth:`hops` with its ``summed``, the
      all-gather's being the last;
    * what rank a sends to rank b is what rank b expects from rank a, in the same order.
    """

    @property
    def compresses(self) -> bool:
        """Whether it compresses anything by itself, whatever the pipeline's compressor is."""
        return False

    @abstractmethod
    def hops(self, world_size: int) -> tuple[Hop, ...]:
        """Return the hops, ascending in ``summed``, the all-gather last; () for one rank."""

    @abstractmethod
    def steps(self, world_size: int, rank: int) -> tuple[Step, ...]:
        """Return the rounds of one rank, reduce-scatter first; () for one rank."""

    def schedule(self, world_size: int) -> "Schedule":
        """Bind the topology to a world size.

        Raises:
            ConfigurationError: world_size < 1.
        """
        if world_size < 1:
            raise ConfigurationError(f"a schedule needs at least one rank, got {world_size}")
        return Schedule(self, world_size)


@dataclass(frozen=True)
class Schedule:
    """A topology at one world size."""

    topology: Topology
    world_size: int
    _steps: dict[int, tuple[Step, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def compressed_ranks(self) -> int:
        """How many ranks' entries the pipeline's compressor sums."""
        return self.world_size

    def compressed_numel(self, numel: int) -> int:
        """Return how many of a tensor's entries one encoding of that compressor covers, rounded up.

        A function of its arguments alone, so the same on all ranks.
        """
        return numel

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        """The hops, the same on all ranks."""
        return self.topology.hops(self.world_size)

    def steps(self, rank: int) -> tuple[Step, ...]:
        """Return the rounds of one rank; computed once."""
        if rank not in self._steps:
            self._steps[rank] = self.topology.steps(self.world_size, rank)
        return self._steps[rank]

    def peers(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that this rank exchanges anything with, ascending."""
        steps = self.steps(rank)
        return tuple(sorted({s.to for s in steps} | {s.source for s in steps}))

    def gather_message(self, chunk: int) -> Message:
        """Return the message that carries the finished chunk in the all-gather."""
        return Message(chunk, chunk, self.world_size, len(self.hops) - 1)
