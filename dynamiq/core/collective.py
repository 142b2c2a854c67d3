"""The multi-hop all-reduce as a generator without I/O.

It yields what should be sent and received and is resumed with the bytes; a driver
(:mod:`dynamiq.core.drivers`) moves them. So a simulation of n ranks in one thread, a blocking
run and several calls in flight are the same code.

Data flows one way: tensor → statistics → encoding → payload → wire → accumulate → tensor.
Source: DynamiQ §3.4.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynamiq.core import agreement
from dynamiq.core.agreement import Header
from dynamiq.core.buffers import Buffers
from dynamiq.core.compressor import Compressor, Encoding, State
from dynamiq.core.errors import InputError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.segments import segments
from dynamiq.core.statistics import StatisticsEncoding
from dynamiq.core.topology import Schedule, Step

T = TypeVar("T")


@dataclass(frozen=True)
class Post:
    """Request: start sending ``payload`` to a peer and receiving ``nbytes`` from a peer.

    The driver resumes the generator at once with a ticket. An absent payload is not sent and 0
    bytes are not awaited.

    Attributes:
        payload: uint8[m], or None.
        to: Peer that takes the payload.
        source: Peer that brings ``nbytes`` bytes.
        nbytes: Bytes to receive.
        label: What this is, for error messages.
        into: uint8[nbytes] on the CPU that may be used for what is received, or None.
        link: Name of the kind of link crossed, as in :class:`dynamiq.core.topology.Step`.
    """

    payload: Tensor | None
    to: int
    source: int
    nbytes: int
    label: str
    into: Tensor | None = None
    link: str = "network"


@dataclass(frozen=True)
class Wait:
    """Request: resume with the uint8[nbytes] of a ticket, or None if nothing was to come."""

    ticket: Any


Request = Post | Wait
Algorithm = Generator[Request, Any, T]


@dataclass(frozen=True)
class Collective:
    """One rank's part in one call.

    Attributes:
        compressor: The wire format.
        schedule: Who sends what to whom.
        rank: This rank, within the schedule.
        numel: Entries d of the tensor.
        call: Seed, number, divisor, and whether an all-gather follows the reduce-scatter.
        name: What users call it, in error messages: ``all_reduce #3 of bucket 0``.
        description: What all ranks must agree on.
        bounds: Chunk boundaries given from outside, or None.
        segments: Into how many parts each chunk is split, so that one is on the wire while
            another is encoded; does not change results.
        state: The compressor's state before the call.
        observer: Told the encoding once it is decided.
        buffers: Memory for payloads.
        compared: Whether the ranks know already that they are in the same call.
    """

    compressor: Compressor
    schedule: Schedule
    rank: int
    numel: int
    call: Call
    name: str = "call"
    description: str = ""
    bounds: tuple[int, ...] | None = None
    segments: int = 1
    state: State = field(default_factory=State)
    observer: Callable[[Encoding[Any]], None] | None = None
    buffers: Buffers = field(default_factory=Buffers)
    compared: bool = False

    def __post_init__(self) -> None:
        """Refuse a reduce-scatter into slices that the compressor may choose."""
        if not self.call.gather and self.bounds is None:
            raise InputError("a reduce-scatter needs the bounds of its slices")

    @property
    def layout(self) -> Layout:
        """How the entries are cut into chunks."""
        n = self.schedule.world_size
        return Layout(self.numel, n, self.compressor.unit(self.numel, n), self.bounds)

    @property
    def volume(self) -> float:
        """Padded entries that the mean rank sends: (n - 1)/n of the bucket in each pass."""
        n, layout = self.schedule.world_size, self.layout
        return (2 if self.call.gather else 1) * (n - 1) / n * layout.units * layout.unit

    @property
    def network_peers(self) -> tuple[int, ...]:
        """Peers that this rank reaches over the network."""
        return self.schedule.peers(self.rank)

    def run(self, x: Tensor, out: Tensor) -> Algorithm[State]:
        """Reduce x[d] over the ranks into out[d] (or out[own chunk]); return the next state.

        ``x`` and ``out`` may be the same memory.

        Raises:
            AgreementError: A peer is in another call; nothing was written.
        """
        n, layout = self.schedule.world_size, self.layout
        if n == 1:
            out.copy_(x)
            return self.state
        header = Header(self.call.number, self.description, agreement.state_digest(self.state))
        tickets = {}
        if not self.compared:
            tickets = yield from post_header(header, self.schedule.peers(self.rank), self.name)
        statistics = None
        if self.numel:
            statistics = self.compressor.statistics(x, layout, self.call, self.state)
        yield from compare(self.rank, [(header, tickets)], self.name)
        if not self.numel:
            return self.state
        reduced = None
        if statistics is not None:
            small = StatisticsEncoding(statistics, n, self.call)
            sums = small.load(statistics.values, self.rank, statistics.values)
            yield from self._exchange(small, sums, x.device, "statistics")
            reduced = small.result(sums)
        encoding = self.compressor.encode(reduced, layout, self.schedule, self.call, self.state)
        if self.observer is not None:
            self.observer(encoding)
        work = encoding.load(x, self.rank, out)
        yield from self._exchange(encoding, work, x.device, "gradients")
        encoding.store(work, out, None if self.call.gather else self.rank)
        return self.compressor.next_state(encoding, work)

    def _exchange(
        self, encoding: Encoding[Any], work: Any, device: torch.device, what: str
    ) -> Algorithm[None]:
        # Statistics are few bytes: a message costs more time than it hides. All ranks need them.
        small = what == "statistics"
        gather = small or self.call.gather
        parts = segments(encoding.positions, 1 if small else self.segments)
        yield from interleave(
            [
                _Rounds(self, encoding, work, part, device, f"{self.name}, {what}").run(gather)
                for part in parts
            ]
        )


@dataclass
class _Rounds:
    """The rounds of one segment: reduce-scatter, then all-gather."""

    collective: Collective
    encoding: Encoding[Any]
    work: Any
    positions: range
    device: torch.device
    label: str
    payloads: dict[int, Tensor] = field(default_factory=dict)

    def run(self, gather: bool) -> Algorithm[None]:
        c = self.collective
        steps = c.schedule.steps(c.rank)
        yield from self._reduce_scatter([s for s in steps if s.reduce], gather)
        if gather:
            yield from self._all_gather([s for s in steps if not s.reduce])

    def _reduce_scatter(self, steps: Sequence[Step], gather: bool) -> Algorithm[None]:
        rank = self.collective.rank
        outgoing = {m.chunk: m for step in steps for m in step.sends}
        if gather:
            outgoing[rank] = self.collective.schedule.gather_message(rank)
        last_input = {m.chunk: step for step in steps for m in step.receives}
        for number, step in enumerate(steps, 1):
            for m in step.sends:
                if m.chunk not in last_input:
                    out = self._buffer(m)
                    self.encoding.compress(self.work, m, self.positions, out)
            ticket = yield self._post(step, f"reduce-scatter step {number} of {len(steps)}")
            received = yield Wait(ticket)
            for m, payload in self._split(step, received):
                target = outgoing.get(m.chunk)
                if target is None or last_input[m.chunk] is not step:
                    self.encoding.decompress_accumulate(payload, self.work, m, self.positions)
                else:
                    out = self._buffer(target)
                    self.encoding.decompress_accumulate_recompress(
                        payload, self.work, m, target, self.positions, out
                    )

    def _all_gather(self, steps: Sequence[Step]) -> Algorithm[None]:
        own = self.collective.schedule.gather_message(self.collective.rank)
        # Decoding waits until the next transfer is under way.
        undecoded = [(own, self.payloads[own.chunk])]
        for number, step in enumerate(steps, 1):
            ticket = yield self._post(step, f"all-gather step {number} of {len(steps)}")
            self._decompress(undecoded)
            received = yield Wait(ticket)
            undecoded = self._split(step, received)
            self.payloads.update((m.chunk, payload) for m, payload in undecoded)
        self._decompress(undecoded)

    def _decompress(self, payloads: Sequence[tuple[Message, Tensor]]) -> None:
        for m, payload in payloads:
            self.encoding.decompress(payload, self.work, m, self.positions)

    def _buffer(self, message: Message) -> Tensor:
        """Return memory for the outgoing payload of the message's chunk."""
        out = self._memory(self._bytes(message))
        self.payloads[message.chunk] = out
        return out

    def _post(self, step: Step, what: str) -> Post:
        parts = [p for p in (self.payloads[m.chunk] for m in step.sends) if p.numel()]
        payload = parts[0] if len(parts) == 1 else self._joined(parts) if parts else None
        nbytes = sum(self._bytes(m) for m in step.receives)
        into = self._memory(nbytes) if nbytes and self.device.type == "cpu" else None
        return Post(payload, step.to, step.source, nbytes, f"{self.label}, {what}", into)

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts), out=self._memory(sum(part.numel() for part in parts)))

    def _split(self, step: Step, received: Tensor | None) -> list[tuple[Message, Tensor]]:
        if received is None:
            received = torch.empty(0, dtype=torch.uint8)
        parts = received.to(self.device).split([self._bytes(m) for m in step.receives])
        # A payload that begins at an odd address cannot be viewed as wider types.
        aligned = [
            p if p.storage_offset() % 16 == 0 else self._memory(p.numel()).copy_(p) for p in parts
        ]
        return list(zip(step.receives, aligned, strict=True))

    def _memory(self, nbytes: int) -> Tensor:
        return self.collective.buffers.take(nbytes, self.device)

    def _bytes(self, message: Message) -> int:
        return self.encoding.payload_bytes(message, self.positions)


def post_header(
    header: Header, peers: Sequence[int], name: str, link: str = "network"
) -> Algorithm[dict[int, Any]]:
    """Start exchanging a header with peers; return the ticket of each."""
    tickets, note = {}, header.pack()
    for peer in peers:
        label = f"{name}, header"
        tickets[peer] = yield Post(note, peer, peer, note.numel(), label, link=link)
    return tickets


def compare(
    rank: int, posted: Sequence[tuple[Header, dict[int, Any]]], name: str
) -> Algorithm[None]:
    """Compare each header with what its peers sent.

    Raises:
        AgreementError: Some differ; they have been told why, and raise it, too.
    """
    differing = {}
    for header, tickets in posted:
        mine = header.pack()
        for peer, ticket in tickets.items():
            theirs = yield Wait(ticket)
            if not torch.equal(mine, theirs.to(mine.device)):
                differing[peer] = header.explain()
    if not differing:
        return
    # Both ends of every differing pair come here, so both expect the other's explanation.
    explanations = {}
    for peer, words in differing.items():
        label = f"{name}, explanation of a mismatch"
        explanations[peer] = yield Post(words, peer, peer, words.numel(), label)
    first, words = next(iter(differing.items()))
    answers = {}
    for peer, ticket in explanations.items():
        answers[peer] = yield Wait(ticket)
    raise agreement.disagreement(rank, words, first, answers[first])


def interleave(algorithms: Sequence[Algorithm[None]]) -> Algorithm[None]:
    """Run several algorithms as one: each posts, then all wait in turn, in the same order.

    While one waits for its bytes the others' are on the wire. The order of requests is a function
    of the algorithms alone, so that equal inputs give matching orders on all ranks.
    """
    waiting: list[tuple[Algorithm[None], Wait]] = []
    for algorithm in algorithms:
        yield from _advance(algorithm, None, waiting)
    while waiting:
        turn, waiting = waiting, []
        for algorithm, wait in turn:
            data = yield wait
            yield from _advance(algorithm, data, waiting)


def _advance(
    algorithm: Algorithm[None], value: Any, waiting: list[tuple[Algorithm[None], Wait]]
) -> Algorithm[None]:
    """Carry out an algorithm's posts up to its next wait, which is noted in ``waiting``."""
    try:
        request = algorithm.send(value)
        while isinstance(request, Post):
            ticket = yield request
            request = algorithm.send(ticket)
        waiting.append((algorithm, request))
    except StopIteration:
        return
