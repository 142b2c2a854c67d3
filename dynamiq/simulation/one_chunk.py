"""One chunk for all of them: simulations of world sizes whose entries fit nowhere.

One chunk's messages are run along its path through the formats' own encodings; the ranks' entries
are drawn when they are needed, and the statistics are what they are on the average.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dynamiq.core.compressor import Compressor, Encoding, State, Statistics
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.topology import Schedule, Topology
from dynamiq.simulation.figures import Sums, Target
from dynamiq.simulation.observed import Log, Observed
from dynamiq.simulation.sources import SUPERGROUP, Drawn
from dynamiq.simulation.tree import tree
from dynamiq.simulation.worlds import Attempt, Trial
from dynamiq.topologies import Hierarchical

PIECE = 512
"""Supergroups that the one chunk is worked on at a time: what a core's cache holds."""
_EARLIER = 1 << 32
"""Added to a piece's call number for the call before it: no two share randomness."""


@dataclass
class OneChunk:
    """One chunk of every rank, drawn from a spectrum.

    The chunk's supergroups are dealt, by energy, to pieces that are encoded one by one, as a
    format's own tiles are. Each piece's statistics are those of one rank that has all ranks'
    energies and no means. Formats that learn from call to call have seen one call, in which nothing
    was lost on the way; so they know the spectrum, and not how the ranks correlate.

    Attributes:
        source: The spectrum of the chunk.
        world_size: Ranks.
    """

    source: Drawn
    world_size: int
    one_chunk: bool = True
    _target: Target | None = field(default=None, repr=False)

    @property
    def numel(self) -> int:
        """Entries of the chunk."""
        return self.source.numel

    @property
    def target(self) -> Target:
        """The exact sum of what was drawn."""
        if self._target is None:
            raise InputError("what is drawn is known once a call has drawn it")
        return self._target

    def run(self, compressor: Compressor, topology: Topology, attempt: Attempt) -> Trial:
        """Run the messages of one chunk; of its pieces the first is watched.

        Raises:
            ConfigurationError: The format's statistics, or its rounding, need all ranks, or the
                topology has two levels.
        """
        if isinstance(topology, Hierarchical):
            raise ConfigurationError(
                "a hierarchical topology cannot be simulated on one chunk, which stands for all "
                "ranks of one level; simulate all chunks, or one column as the flat topology that "
                "is between the nodes"
            )
        if getattr(compressor, "rounding", None) == "correlated":
            raise ConfigurationError(
                "correlated rounding cannot be simulated on one chunk: every message would need "
                "the places of all ranks; choose another rounding, or fewer ranks and all chunks"
            )
        schedule = topology.schedule(self.world_size)
        learns = compressor.stateful and attempt.warm_up_calls > 0
        log = Log(range(1 if attempt.watch else 0))
        watched: Compressor = Observed.by(compressor, log)
        pieces = []
        for number, hand in enumerate(self._hands()):
            state = State()
            if learns:
                earlier = Call(attempt.seed, number + _EARLIER)
                state = Piece(hand, compressor, schedule, earlier).learn()
            pieces.append(Piece(hand, watched, schedule, Call(attempt.seed, number), state).run())
            watched = compressor
        if attempt.watch:
            log.energy = pieces[0].target().total.square().sum().item()
        if self._target is None:
            self._target = Target.joined([piece.target() for piece in pieces])
        sent = sum(piece.bytes_sent for piece in pieces)
        crossings = 2 * (self.world_size - 1) * sum(piece.padded for piece in pieces)
        estimate = torch.cat([piece.estimate for piece in pieces])
        return Trial(estimate, 8 * sent / crossings, sent, log)

    def _hands(self) -> list[Drawn]:
        return self.source.dealt(-(-self.source.deviations.numel() // PIECE))


class Piece:
    """One chunk's messages, node by node.

    Attributes:
        encoding: The format's, of this call.
        estimate: float32[d], once the call has run: the sum that every rank ends with.
        padded: Entries that the format sends, padding included.
        bytes_sent: By all ranks, statistics included.
    """

    def __init__(
        self,
        source: Drawn,
        compressor: Compressor,
        schedule: Schedule,
        call: Call,
        state: State | None = None,
    ) -> None:
        """Decide how the call is encoded."""
        self.source, self.schedule, self.compressor = source, schedule, compressor
        d, n = source.numel, schedule.world_size
        # For the format it is a bucket of one chunk, which happens to cross many ranks.
        layout = Layout(d, 1, compressor.unit(d, 1))
        state = state or State()
        statistics = _expected(source, compressor, layout, call, n, state)
        reduced = None if statistics is None else statistics.values
        self.encoding: Encoding[Any] = compressor.encode(reduced, layout, schedule, call, state)
        self.estimate = torch.empty(d)
        self.padded = layout.padded_numel
        self.bytes_sent = 2 * (n - 1) * _wire_bytes(statistics)
        self._positions = range(self.encoding.positions)
        self._sums = Sums(d)
        self._payloads: dict[int, Tensor] = {}

    @torch.no_grad()
    def run(self) -> "Piece":
        """Run the reduce-scatter along the tree, and decode what the owner sends to all."""
        work = None
        for node in tree(self.schedule):
            if node.inputs:
                work = self._add(node.message, node.inputs)
        self._finish(work)
        return self

    @torch.no_grad()
    def learn(self) -> State:
        """Return the state after a call in which only the finished sum lost something."""
        n, rho = self.schedule.world_size, self.source.correlation
        growth = (n * (1.0 + (n - 1) * rho)) ** 0.5
        total = replace(self.source, deviations=self.source.deviations * growth, correlation=0.0)
        work = self.encoding.load(total.entries(0), 0, self.estimate)
        message = self.schedule.gather_message(0)
        out = self._payload(message)
        self.encoding.compress(work, message, self._positions, out)
        self._finish(work)
        return self.compressor.next_state(self.encoding, work)

    def target(self) -> Target:
        """Return the exact sum of what the run drew."""
        return self._sums.target(self.schedule.world_size)

    def _add(self, message: Message, inputs: Sequence[Message]) -> Any:
        """Add the inputs to a rank's own entries and compress the sum, as a real call would."""
        x = self.source.entries(message.sender)
        self._sums.add(x)
        work = self.encoding.load(x, message.sender, self.estimate)
        out = self._payload(message)
        for incoming in inputs[:-1]:
            payload = self._arriving(incoming)
            self.encoding.decompress_accumulate(payload, work, incoming, self._positions)
        if inputs:
            payload = self._arriving(inputs[-1])
            self.encoding.decompress_accumulate_recompress(
                payload, work, inputs[-1], message, self._positions, out
            )
        else:
            self.encoding.compress(work, message, self._positions, out)
        hop = self.schedule.hops[message.hop]
        self.bytes_sent += out.numel() * (1 if hop.reduce else hop.transfers)
        return work

    def _arriving(self, message: Message) -> Tensor:
        """Return the payload of a message, for the only time; who adds nothing compresses it now.

        So few payloads are kept, also where one rank adds those of all others.
        """
        if message.sender not in self._payloads:
            self._add(message, ())
        return self._payloads.pop(message.sender)

    def _payload(self, message: Message) -> Tensor:
        size = self.encoding.payload_bytes(message, self._positions)
        out = self._payloads[message.sender] = torch.empty(size, dtype=torch.uint8)
        return out

    def _finish(self, work: Any) -> None:
        message = self.schedule.gather_message(0)
        self.encoding.decompress(self._payloads[0], work, message, self._positions)
        self.encoding.store(work, self.estimate)


def _expected(
    source: Drawn,
    compressor: Compressor,
    layout: Layout,
    call: Call,
    world_size: int,
    state: State,
) -> Statistics | None:
    """Return the reduced statistics that a call on many ranks would have on the average.

    Entries whose signs alternate have the energy of all ranks and no mean.
    """
    deviation = source.deviations * world_size**0.5
    signs = torch.tensor([1.0, -1.0]).repeat(SUPERGROUP // 2)
    x = (deviation[:, None] * signs).view(-1)
    statistics = compressor.statistics(x, layout, call, state)
    if statistics is None:
        return None
    if statistics.reduction != "sum":
        raise ConfigurationError(
            f"one chunk of a spectrum has no {statistics.reduction} over ranks, which this "
            f"format's statistics are; simulate fewer ranks and all chunks"
        )
    values = statistics.values
    if statistics.format == "bf16":
        values = values.bfloat16().float()
    return Statistics(values, "sum", statistics.format)


def _wire_bytes(statistics: Statistics | None) -> int:
    if statistics is None:
        return 0
    return statistics.values.numel() * (2 if statistics.format == "bf16" else 4)
