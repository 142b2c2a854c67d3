"""The exchanges that one call is made of: what each sends is what the pipeline's own code says."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from dynamiq.core.agreement import HEADER_BYTES
from dynamiq.core.compressor import Compressor, Sizes, State, Statistics
from dynamiq.core.hierarchy import HierarchicalSchedule
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.segments import segments
from dynamiq.core.statistics import StatisticsEncoding
from dynamiq.core.topology import Schedule, Step


@dataclass(frozen=True)
class Stage:
    """One exchange of one rank: rounds on a schedule of one level.

    Attributes:
        compressor: The wire format; None for the bytes of finished entries as they are.
        schedule: Who sends what to whom.
        rank: Within the schedule.
        layout: How entries are cut into chunks.
        link: "network" or "node".
        reduce: Whether it has a reduce-scatter.
        gather: Whether it has an all-gather.
        entry_bytes: Of an entry, without a compressor.
    """

    compressor: Compressor | None
    schedule: Schedule
    rank: int
    layout: Layout
    link: str
    reduce: bool = True
    gather: bool = True
    entry_bytes: int = 4

    @cached_property
    def sizes(self) -> Sizes:
        """What the rounds send."""
        if self.compressor is None:
            layout, size = self.layout, self.entry_bytes
            return Sizes(1, lambda message, _: layout.slice_numel(message.chunk) * size)
        call = Call(gather=self.gather)
        return self.compressor.sizes(self.layout, self.schedule, call, State())

    @property
    def steps(self) -> list[Step]:
        """The rounds of this rank."""
        steps = self.schedule.steps(self.rank)
        return [s for s in steps if (self.reduce if s.reduce else self.gather)]

    def parts(self, count: int) -> tuple[range, ...]:
        """Return the segments."""
        return segments(self.sizes.positions, count)

    def entries(self, part: range) -> float:
        """Return how many entries of a chunk a segment has, on average."""
        layout = self.layout
        share = len(part) / max(1, self.sizes.positions)
        return layout.numel / layout.world_size * share

    @property
    def statistics(self) -> "Statistic | None":
        """The small exchange before, or None."""
        if not self.sizes.statistics:
            return None
        values = torch.empty(self.sizes.statistics, device="meta")
        # Neither reduction changes sizes, and bits have only this one.
        statistics = Statistics(values, "max", self.sizes.format)
        encoding = StatisticsEncoding(statistics, self.schedule.world_size, Call())
        return Statistic(encoding.layout, encoding.positions, encoding.payload_bytes)

    def bytes_sent(self, count: int) -> int:
        """Return all bytes that this rank sends in so many segments, statistics included."""
        parts, payload_bytes = self.parts(count), self.sizes.payload_bytes
        total = sum(
            payload_bytes(m, part) for step in self.steps for m in step.sends for part in parts
        )
        small = self.statistics
        if small is not None:
            whole = range(small.positions)
            steps = self.schedule.steps(self.rank)
            total += sum(small.payload_bytes(m, whole) for step in steps for m in step.sends)
        return total


@dataclass(frozen=True)
class Statistic:
    """The exchange of statistics.

    Attributes:
        layout: How values are cut into chunks.
        positions: Of its encoding.
        payload_bytes: Of its encoding.
    """

    layout: Layout
    positions: int
    payload_bytes: Callable[[Message, range], int]


@dataclass(frozen=True)
class Headers:
    """What ranks compare before anything else.

    Attributes:
        peers: How many.
        link: That leads to them.
    """

    peers: int
    link: str

    @property
    def bytes_sent(self) -> int:
        """Of this rank to all peers."""
        return self.peers * HEADER_BYTES


@dataclass(frozen=True)
class CallShape:
    """All that one rank does in one call.

    Attributes:
        headers: By link.
        stages: In their order.
    """

    headers: tuple[Headers, ...]
    stages: tuple[Stage, ...]

    def bytes_sent(self, segment_count: int) -> int:
        """Return all bytes that this rank sends."""
        small = sum(headers.bytes_sent for headers in self.headers)
        return small + sum(stage.bytes_sent(segment_count) for stage in self.stages)


@dataclass(frozen=True)
class Request:
    """An all-reduce of one tensor.

    Attributes:
        compressor: The wire format.
        schedule: Who sends what to whom.
        numel: Entries.
        entry_bytes: Of an entry of the tensor.
        rank: Whose part.
        plain: Whether ``compressor`` is what small tensors travel as, inside nodes, too.
    """

    compressor: Compressor
    schedule: Schedule
    numel: int
    entry_bytes: int = 4
    rank: int = 0
    plain: bool = False

    def shape(self) -> CallShape:
        """Return what a rank does, as ``Collective`` and ``HierarchicalCollective`` do it."""
        schedule = self.schedule
        if schedule.world_size == 1:
            return CallShape((), ())
        if not isinstance(schedule, HierarchicalSchedule):
            headers = Headers(len(schedule.peers(self.rank)), "network")
            return CallShape((headers,), (self._flat(schedule, self.rank, self.numel),))
        places = schedule.intra.world_size
        node, place = divmod(self.rank, places)
        headers_of = (
            Headers(len(schedule.intra.peers(place)), "node"),
            Headers(len(schedule.inter.peers(node)), "network"),
        )
        return CallShape(headers_of, tuple(self._levels(schedule, node, place)))

    def _flat(self, schedule: Schedule, rank: int, numel: int) -> Stage:
        unit = self.compressor.unit(numel, schedule.world_size)
        layout = Layout(numel, schedule.world_size, unit)
        return Stage(self.compressor, schedule, rank, layout, "network")

    def _levels(self, schedule: HierarchicalSchedule, node: int, place: int) -> Iterator[Stage]:
        places, nodes = schedule.intra.world_size, schedule.inter.world_size
        unit = self.compressor.unit(-(-self.numel // places), nodes)
        slices: Sequence[int] = Layout(self.numel, places, unit).slice_offsets().tolist()
        bounds = tuple(slices)
        if places > 1:
            local = self.compressor if self.plain else schedule.local
            layout = Layout(self.numel, places, local.unit(self.numel, places), bounds)
            yield Stage(local, schedule.intra, place, layout, "node", gather=False)
        if nodes > 1:
            yield self._flat(schedule.inter, node, bounds[place + 1] - bounds[place])
        if places > 1:
            whole = Layout(self.numel, places, 1, bounds)
            yield Stage(None, schedule.intra, place, whole, "node", False, True, self.entry_bytes)
