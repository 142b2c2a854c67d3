"""What one rank does in one call, as a list that a clock can be run over.

The order of everything is that of ``dynamiq.core.collective``: header, statistics, then the
segments' rounds in turn, each awaiting its bytes, working on them and posting the next.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dynamiq.planner.cost.codec import codec_of
from dynamiq.planner.cost.links import Transfer, transfer
from dynamiq.planner.cost.rounds import Round, rounds_of
from dynamiq.planner.cost.stages import CallShape, Stage
from dynamiq.planner.profiles.hardware import CodecCost, HardwareProfile, OperationCost


@dataclass(slots=True)
class Block:
    """Work between two waits.

    Attributes:
        wait: Index of the block whose message must have come first; None for none.
        before_s: Work before the post.
        post: What is sent, and received at the same time; None for nothing.
        after_s: Work after the post.
    """

    wait: int | None
    before_s: float = 0.0
    post: Transfer | None = None
    after_s: float = 0.0


def seconds(cost: OperationCost, times: float, entries: float) -> float:
    """Return what so many operations on so many entries in all take."""
    return times * cost.fixed_s + entries * cost.entry_s


@dataclass(frozen=True)
class Clockwork:
    """Turns calls into blocks.

    Attributes:
        hardware: Links and costs.
        most_rounds: Of each pass, rounds looked at one by one.
    """

    hardware: HardwareProfile
    most_rounds: int

    def blocks(self, shape: CallShape, segment_count: int) -> list[Block]:
        """Return a call's blocks in the order of its requests."""
        blocks: list[Block] = []
        for headers in shape.headers:
            if headers.peers:
                offset = 1 if headers.link == "node" else self.hardware.ranks_per_node
                post = transfer(self.hardware, headers.link, offset, headers.bytes_sent)
                blocks.append(Block(None, headers.peers * self._message_s, post))
        waits = list(range(len(blocks)))
        for number, stage in enumerate(shape.stages):
            costs = codec_of(self.hardware.processor, stage.compressor)
            start = Block(None)
            if stage.compressor is not None:
                statistics_s = seconds(costs.statistics, 1, stage.layout.numel)
                if number == 0 and blocks:
                    blocks[-1].after_s += statistics_s
                else:
                    start.before_s += statistics_s
            blocks += [Block(index) for index in waits]
            waits = []
            blocks.append(start)
            self._add(blocks, [self._statistics(stage, costs)])
            if stage.compressor is not None:
                once = seconds(costs.encode, 1, stage.layout.numel)
                blocks.append(Block(None, once))
            self._add(blocks, [self._rounds(stage, costs, p) for p in stage.parts(segment_count)])
            if stage.compressor is not None:
                blocks.append(Block(None, seconds(costs.next_state, 1, stage.layout.numel)))
        return blocks

    def _add(self, blocks: list[Block], segments: Sequence[Iterator[Block]]) -> None:
        """Add the blocks of segments in turn, each after its message."""
        last: list[int | None] = [None] * len(segments)
        turns = [list(segment) for segment in segments]
        for row in zip(*turns, strict=True):
            for place, block in enumerate(row):
                block.wait = last[place]
                last[place] = len(blocks) if block.post is not None else None
                blocks.append(block)

    def _statistics(self, stage: Stage, costs: CodecCost) -> Iterator[Block]:
        small = stage.statistics
        if small is None:
            return
        whole, each = range(small.positions), small.layout.numel / small.layout.world_size
        pending = 0.0
        for r in rounds_of(stage.schedule, stage.rank, True, self.most_rounds):
            nbytes = sum(small.payload_bytes(m, whole) for m in r.step.sends[r.sampled])
            made = r.times * seconds(costs.statistics_message, r.compressed, r.compressed * each)
            yield self._block(stage, r, nbytes, pending + made, 0.0)
            # Sums are added up and sent on, or kept; finished ones are read.
            pending = r.times * seconds(costs.statistics_message, r.receives, r.receives * each)
        yield Block(None, pending)

    def _rounds(self, stage: Stage, costs: CodecCost, part: range) -> Iterator[Block]:
        each = stage.entries(part)
        payload_bytes = stage.sizes.payload_bytes

        def work(cost: OperationCost, messages: int) -> float:
            return seconds(cost, messages, messages * each)

        pending, undecoded = 0.0, 0.0
        if stage.gather and stage.compressor is not None:
            undecoded = work(costs.decompress, 1)
        for r in rounds_of(stage.schedule, stage.rank, stage.gather, self.most_rounds):
            if not (stage.reduce if r.step.reduce else stage.gather):
                continue
            nbytes = sum(payload_bytes(m, part) for m in r.step.sends[r.sampled])
            if r.step.reduce:
                made = r.times * work(costs.compress, r.compressed)
                yield self._block(stage, r, nbytes, pending + made, 0.0)
                pending = r.times * (
                    work(costs.recompress, r.recompressed) + work(costs.accumulate, r.accumulated)
                )
            else:
                yield self._block(stage, r, nbytes, pending, undecoded)
                pending = 0.0
                undecoded = r.times * work(costs.decompress, r.receives)
        yield Block(None, pending + (undecoded if stage.gather else 0.0))

    def _block(
        self, stage: Stage, r: Round, sampled_bytes: float, before_s: float, after_s: float
    ) -> Block:
        # Where this rank's payload is empty, another's is not, and that one is on its way for long.
        nbytes = sampled_bytes * r.sends / max(1, len(r.step.sends[r.sampled]))
        # Neighbours on a schedule are as far apart in the world as it has fewer ranks.
        stride = self.hardware.world_size // stage.schedule.world_size
        offset = r.offset * (1 if stage.link == "node" else stride)
        one = transfer(self.hardware, stage.link, offset, nbytes)
        post = Transfer(one.link, r.times * one.occupied_s, r.times * one.delay_s)
        moved = r.times * nbytes * self._byte_s
        return Block(None, before_s + r.times * self._message_s, post, after_s + moved)

    @property
    def _message_s(self) -> float:
        """What posting and awaiting take, on this rank's share of the processors."""
        return self.hardware.processor.message_s / self._own

    @property
    def _byte_s(self) -> float:
        """What moving a byte takes from the thread that encodes; nothing if it has a processor."""
        cores = self.hardware.processor.cores_per_rank
        if cores is None or cores >= 2:
            return 0.0
        return self.hardware.processor.byte_s / self._own

    @property
    def _own(self) -> float:
        return min(1.0, self.hardware.processor.cores_per_rank or 1.0)
