"""Two levels of ranks: what stays inside a node costs little, what leaves it is compressed.

Ranks r = node * places + place, as torchrun numbers them. The ranks of a node form one group, those
of equal place on all nodes another, a *column*. A call is a reduce-scatter inside the node, the
compressed collective over the column of each place, and an all-gather inside the node. Only
columns cross the network, each with its own slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynamiq.core import agreement, randomness
from dynamiq.core.agreement import Header
from dynamiq.core.buffers import Buffers
from dynamiq.core.collective import Algorithm, Collective, Post, Wait, compare, post_header
from dynamiq.core.compressor import Compressor, State
from dynamiq.core.layout import Layout
from dynamiq.core.randomness import Stream
from dynamiq.core.topology import Schedule

T = TypeVar("T")


@dataclass(frozen=True)
class HierarchicalSchedule(Schedule):
    """A topology of two levels at one world size.

    Attributes:
        intra: Schedule inside a node.
        inter: Schedule of a column.
        local: Wire format inside a node.
    """

    intra: Schedule = field(kw_only=True)
    inter: Schedule = field(kw_only=True)
    local: Compressor = field(kw_only=True)

    @property
    def compressed_ranks(self) -> int:
        """How many ranks a column has."""
        return self.inter.world_size

    def compressed_numel(self, numel: int) -> int:
        """Return the entries of a column."""
        return -(-numel // self.intra.world_size)

    def node(self, rank: int) -> range:
        """Return the ranks of a rank's node."""
        places = self.intra.world_size
        first = rank - rank % places
        return range(first, first + places)

    def column(self, rank: int) -> range:
        """Return the ranks of a rank's place on all nodes."""
        places = self.intra.world_size
        return range(rank % places, self.world_size, places)


@dataclass(frozen=True)
class HierarchicalCollective(Collective):
    """One rank's part in one call on two levels.

    The compressor, its state and the segments are those of the column; the state belongs to the
    column, and its digest is compared there. All headers, of node and column, are compared before
    anything else is sent. Between the levels entries are float32 (float64 for float64), so that
    16-bit tensors lose nothing there. Column 0 has the seed of the call, every other column and
    every node one of its own, so with one rank per node this is the flat collective, bit for bit.
    With more the observer is told nothing: what an encoding predicts is the error of one column.
    """

    schedule: HierarchicalSchedule

    @property
    def volume(self) -> float:
        """Padded entries that a rank sends between nodes, over all passes."""
        return self._column.volume if self._nodes > 1 else 0.0

    @property
    def network_peers(self) -> tuple[int, ...]:
        """Peers on other nodes."""
        column = self.schedule.column(self.rank)
        return tuple(column[peer] for peer in self.schedule.inter.peers(self._column.rank))

    def run(self, x: Tensor, out: Tensor) -> Algorithm[State]:
        """Reduce x[d] into out[d] (or this rank's slice); return the column's next state.

        An all-reduce writes ``out`` when the column has ended, with more than one rank per node.

        Raises:
            AgreementError: A peer in the node or the column is in another call.
        """
        if self.schedule.world_size == 1:
            out.copy_(x)
            return self.state
        yield from self._agree()
        members, column = self.schedule.node(self.rank), self.schedule.column(self.rank)
        entries, result, state = x, out, self.state
        if self._places > 1:
            if self.call.gather:
                result = self._memory(out.dtype, x.device)
            wide = torch.float64 if x.dtype is torch.float64 else torch.float32
            entries = result if self._nodes == 1 else self._memory(wide, x.device)
            ordered = x if self.call.gather else self._by_place(x)
            yield from within(self._node.run(ordered, entries), members, "node")
        if self._nodes > 1:
            state = yield from within(self._column.run(entries, result), column, "network")
        if self._places > 1 and self.call.gather:
            yield from within(all_gather(self._node, result, out), members, "node")
        return state

    @property
    def _places(self) -> int:
        return self.schedule.intra.world_size

    @property
    def _nodes(self) -> int:
        return self.schedule.inter.world_size

    @property
    def _place(self) -> int:
        return self.rank % self._places

    @cached_property
    def _slices(self) -> tuple[int, ...]:
        """Where the slice of each place begins and ends."""
        if self.bounds is not None:
            sizes = [
                sum(self.bounds[r + 1] - self.bounds[r] for r in self.schedule.column(place))
                for place in range(self._places)
            ]
            return tuple(sum(sizes[:place]) for place in range(self._places + 1))
        unit = self.compressor.unit(-(-self.numel // self._places), self._nodes)
        return tuple(Layout(self.numel, self._places, unit).slice_offsets().tolist())

    @cached_property
    def _node(self) -> Collective:
        """The reduce-scatter inside the node."""
        node = self.rank // self._places
        call = replace(
            self.call,
            seed=randomness.key(self.call.seed, Stream.NODE, node),
            divisor=1 if self.call.divisor == 1 else self._places,
            gather=False,
        )
        return Collective(
            self.schedule.local,
            self.schedule.intra,
            self._place,
            self.numel,
            call,
            name=f"{self.name}, inside node {node}",
            bounds=self._slices,
            segments=self.segments,
            buffers=self.buffers,
            compared=True,
        )

    @cached_property
    def _column(self) -> Collective:
        """The collective of all nodes' ranks of this place."""
        place, seed, bounds = self._place, self.call.seed, None
        if self.bounds is not None:
            own = [self.bounds[r + 1] - self.bounds[r] for r in self.schedule.column(self.rank)]
            bounds = tuple(sum(own[:node]) for node in range(self._nodes + 1))
        call = replace(
            self.call,
            seed=randomness.key(seed, Stream.COLUMN, place) if place else seed,
            divisor=1 if self.call.divisor == 1 else self._nodes,
        )
        return Collective(
            self.compressor,
            self.schedule.inter,
            self.rank // self._places,
            self._slices[place + 1] - self._slices[place],
            call,
            name=f"{self.name}, between nodes" if self._places > 1 else self.name,
            bounds=bounds,
            segments=self.segments,
            state=self.state,
            observer=self.observer if self._places == 1 else None,
            buffers=self.buffers,
            compared=True,
        )

    def _agree(self) -> Algorithm[None]:
        node = Header(self.call.number, self.description)
        column = replace(node, state=agreement.state_digest(self.state))
        members = self.schedule.node(self.rank)
        near = [members[peer] for peer in self.schedule.intra.peers(self._place)]
        posted = [
            (node, (yield from post_header(node, near, self.name, "node"))),
            (column, (yield from post_header(column, self.network_peers, self.name))),
        ]
        yield from compare(self.rank, posted, self.name)

    def _by_place(self, x: Tensor) -> Tensor:
        """Return x[d] with the slices of a column's ranks side by side."""
        if self._nodes == 1 or self.bounds is None:
            return x
        return torch.cat(
            [
                x[self.bounds[rank] : self.bounds[rank + 1]]
                for place in range(self._places)
                for rank in self.schedule.column(place)
            ]
        )

    def _memory(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = self._slices[self._place + 1] - self._slices[self._place]
        return self.buffers.take(count * dtype.itemsize, device).view(dtype)


def on_levels(collective: Collective, *, plain: bool = False) -> Collective:
    """Return a collective as its schedule wants it: on two levels if that has two.

    Args:
        collective: As it would be on one level.
        plain: Whether its compressor is to be the wire format inside nodes, too: the floats that
            fit the tensor's dtype, not what the pipeline was built with.
    """
    schedule = collective.schedule
    if not isinstance(schedule, HierarchicalSchedule):
        return collective
    values = {f.name: getattr(collective, f.name) for f in fields(collective)}
    if plain:
        values["schedule"] = replace(schedule, local=collective.compressor)
    return HierarchicalCollective(**values)


def within(algorithm: Algorithm[T], ranks: Sequence[int], link: str) -> Algorithm[T]:
    """Run the algorithm of a group whose i-th rank is ``ranks[i]``."""
    value: Any = None
    while True:
        try:
            request = algorithm.send(value)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if isinstance(request, Post):
            to, source = ranks[request.to], ranks[request.source]
            request = replace(request, to=to, source=source, link=link)
        value = yield request


def all_gather(collective: Collective, own: Tensor, out: Tensor) -> Algorithm[None]:
    """Complete out[d] with the ranks' slices, this one's being own[k], byte for byte.

    The slices are those of the collective's bounds, the steps those of its schedule's all-gather.
    Nothing is sent from out, or received there: transports may hold such memory beyond the call.
    """
    memory, size = out.view(torch.uint8), out.element_size()
    payloads: dict[int, Tensor] = {}

    def keep(chunk: int, payload: Tensor) -> None:
        memory[place(chunk)].copy_(payload)
        if chunk in last_sent:
            payloads[chunk] = payload

    def place(chunk: int) -> slice:
        start, stop = collective.layout.slice_bounds(chunk)
        return slice(start * size, stop * size)

    steps = [s for s in collective.schedule.steps(collective.rank) if not s.reduce]
    last_sent = {m.chunk: number for number, step in enumerate(steps, 1) for m in step.sends}
    keep(collective.rank, own.view(torch.uint8))
    for number, step in enumerate(steps, 1):
        label = f"{collective.name}, result, all-gather step {number} of {len(steps)}"
        sizes = [memory[place(m.chunk)].numel() for m in step.receives]
        nbytes, into = sum(sizes), None
        if nbytes and out.is_cpu:
            into = collective.buffers.take(nbytes, out.device)
        payload = _joined([payloads[m.chunk] for m in step.sends], collective.buffers)
        ticket = yield Post(payload, step.to, step.source, nbytes, label, into)
        received = yield Wait(ticket)
        for m in step.sends:
            if last_sent[m.chunk] == number:
                del payloads[m.chunk]
        parts = (memory[:0] if received is None else received.to(out.device)).split(sizes)
        for m, part in zip(step.receives, parts, strict=True):
            keep(m.chunk, part)


def _joined(parts: Sequence[Tensor], buffers: Buffers) -> Tensor | None:
    """Return the parts as one payload, or None if there is nothing in them."""
    full = [part for part in parts if part.numel()]
    if len(full) <= 1:
        return full[0] if full else None
    memory = buffers.take(sum(part.numel() for part in full), full[0].device)
    return torch.cat(full, out=memory)
