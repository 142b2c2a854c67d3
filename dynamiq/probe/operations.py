"""One rank's part in a call, operation by operation, with nothing sent."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamiq.core.compressor import Compressor, Encoding, State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.statistics import StatisticsEncoding
from dynamiq.core.topology import Schedule
from dynamiq.probe.clock import Clock

PER_CALL = ("statistics", "encode", "next_state")
PER_MESSAGE = ("compress", "accumulate", "recompress", "decompress")
STATISTICS_MESSAGE = "statistics_message"


@dataclass(frozen=True)
class RankAlone:
    """Does what a rank does in a call, in its order.

    What peers would send, the rank makes itself, of the right size, from the entries that it has.

    Attributes:
        compressor: The format.
        schedule: Of all ranks.
        rank: This one, in the schedule.
        clock: Where operations are noted: those of ``PER_CALL`` by the entries of the tensor, those
            of ``PER_MESSAGE`` by the entries of a message; and what the round of statistics does
            for a message, by the statistics in it.
    """

    compressor: Compressor
    schedule: Schedule
    rank: int
    clock: Clock

    def call(self, x: Tensor, out: Tensor, number: int, state: State) -> State:
        """Do the operations of one call on x[d]; return the next call's state."""
        n, numel, clock = self.schedule.world_size, x.numel(), self.clock
        call = Call(number=number, divisor=n)
        layout = Layout(numel, n, self.compressor.unit(numel, n))
        with clock.time("statistics", numel):
            statistics = self.compressor.statistics(x, layout, call, state)
        reduced = None
        if statistics is not None:
            small = StatisticsEncoding(statistics, n, call)
            sums = small.load(statistics.values, self.rank, statistics.values)
            self._reduce(small, sums)
            reduced = small.result(sums)
        with clock.time("encode", numel):
            encoding = self.compressor.encode(reduced, layout, self.schedule, call, state)
            work = encoding.load(x, self.rank, out)
        self._messages(encoding, work, layout.chunk_numel)
        began = clock.now()
        encoding.store(work, out)
        clock.seconds["encode"][-1] += clock.now() - began
        with clock.time("next_state", numel):
            return self.compressor.next_state(encoding, work)

    def _reduce(self, small: StatisticsEncoding, sums: Tensor) -> None:
        clock = Clock(self.clock.together, self.clock.cores_per_rank)
        inner = RankAlone(self.compressor, self.schedule, self.rank, clock)
        inner._messages(small, sums, small.layout.chunk_numel)
        spent = [seconds for name in PER_MESSAGE for seconds in clock.seconds[name]]
        self.clock.seconds[STATISTICS_MESSAGE] += spent
        self.clock.entries[STATISTICS_MESSAGE] = small.layout.chunk_numel

    def _messages(self, encoding: Encoding[Any], work: Any, entries: int) -> None:
        """Compress, accumulate and decompress what the schedule says."""
        steps, clock = self.schedule.steps(self.rank), self.clock
        outgoing = {m.chunk: m for step in steps if step.reduce for m in step.sends}
        outgoing[self.rank] = self.schedule.gather_message(self.rank)
        incoming = {m.chunk: m for step in steps if step.reduce for m in step.receives}
        positions = range(encoding.positions)
        payloads = {c: self._payload(encoding, work, m) for c, m in incoming.items()}
        for chunk, message in outgoing.items():
            if chunk not in incoming:
                out = self._memory(encoding, message)
                with clock.time("compress", entries):
                    encoding.compress(work, message, positions, out)
        for chunk, message in incoming.items():
            with clock.time("accumulate", entries):
                encoding.decompress_accumulate(payloads[chunk], work, message, positions)
        for chunk, message in incoming.items():
            out = self._memory(encoding, outgoing[chunk])
            with clock.time("recompress", entries):
                encoding.decompress_accumulate_recompress(
                    payloads[chunk], work, message, outgoing[chunk], positions, out
                )
        finished = [self.schedule.gather_message(c) for c in range(self.schedule.world_size)]
        payloads = {m.chunk: self._payload(encoding, work, m) for m in finished}
        for message in finished:
            with clock.time("decompress", entries):
                encoding.decompress(payloads[message.chunk], work, message, positions)

    def _payload(self, encoding: Encoding[Any], work: Any, message: Message) -> Tensor:
        out = self._memory(encoding, message)
        encoding.compress(work, message, range(encoding.positions), out)
        return out

    def _memory(self, encoding: Encoding[Any], message: Message) -> Tensor:
        nbytes = encoding.payload_bytes(message, range(encoding.positions))
        return torch.empty(nbytes, dtype=torch.uint8, device=self.clock.together.device)
