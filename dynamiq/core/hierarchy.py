"""Two levels of ranks: what stays inside a node costs little, what leaves it is compressed.

Ranks r = node * places + place, as torchrun numbers them. The ranks of a node form one group, those
of equal place on all nodes another, a *column*. A call is a reduce-scatter inside the node, the
compressed collective over the column of each place, and an all-gather inside the node. Only
columns cross the network, each with its own slice.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynamiq.core import agreement, randomness
from dynamiq.core.agreement import Header
from dynamiq.core.collective import Algorithm, Collective, Post, Wait, compare, post_header
from dynamiq.core.compressor import Compressor, State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Message
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
    The observer is told nothing: what an encoding predicts is the error of one column.

    Attributes:
        plain: Whether entries travel in the call's compressor inside the node, too, because that
            is chosen to fit the tensor's dtype.
    """

    plain: bool = False
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
            start, stop = self._slices[self._place : self._place + 2]
            out[start:stop].copy_(result)
            yield from within(all_gather(self._node, out), members, "node")
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
            self.compressor if self.plain else self.schedule.local,
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


def collective_on(schedule: Schedule, *arguments: Any, plain: bool, **options: Any) -> Collective:
    """Return the collective that a schedule calls for.

    Args:
        schedule: Of one level or of two.
        arguments: Rank, entries and call, as in :class:`dynamiq.core.collective.Collective`.
        plain: As in :class:`HierarchicalCollective`; of no matter on one level.
        options: The other fields, the compressor among them.
    """
    rank, numel, call = arguments
    values = {"schedule": schedule, "rank": rank, "numel": numel, "call": call, **options}
    if isinstance(schedule, HierarchicalSchedule):
        return HierarchicalCollective(**values, plain=plain)
    return Collective(**values)


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


def all_gather(collective: Collective, out: Tensor) -> Algorithm[None]:
    """Complete out[d], of which this rank has its slice, with the bytes of the other ranks'.

    The slices are those of the collective's bounds, the steps those of its schedule's all-gather.
    """
    memory, size = out.view(torch.uint8), out.element_size()

    def place(message: Message) -> Tensor:
        start, stop = collective.layout.slice_bounds(message.chunk)
        return memory[start * size : stop * size]

    steps = [s for s in collective.schedule.steps(collective.rank) if not s.reduce]
    for number, step in enumerate(steps, 1):
        parts = [part for part in map(place, step.sends) if part.numel()]
        payload = parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None
        places = [place(m) for m in step.receives]
        sizes = [part.numel() for part in places]
        nbytes, into = sum(sizes), None
        if nbytes and out.is_cpu:
            into = collective.buffers.take(nbytes, out.device)
        label = f"{collective.name}, result, all-gather step {number} of {len(steps)}"
        ticket = yield Post(payload, step.to, step.source, nbytes, label, into)
        received = yield Wait(ticket)
        if received is not None:
            for part, data in zip(places, received.split(sizes), strict=True):
                part.copy_(data)
