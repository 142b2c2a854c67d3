"""The Microscaling formats: 8, 6 or 4 bits for an entry, and a power of two for every 32."""

from typing import Any, Literal

import torch
from torch import Tensor

from dynamiq.compressors.supergroups import Supergroups
from dynamiq.core import randomness
from dynamiq.core.arithmetic import split_divisor
from dynamiq.core.compressor import Compressor, State, Statistics
from dynamiq.core.dense import PaddedEncoding
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.randomness import Stream
from dynamiq.core.registry import compressor_registry
from dynamiq.core.topology import Schedule
from dynamiq.kernels.mx import ops, reference
from dynamiq.kernels.mx.wire import (
    BLOCK,
    BLOCKS,
    ELEMENTS,
    NAN_SCALE,
    SUPERGROUP,
    Name,
    Quantizer,
    Rounding,
    ScaleRule,
    Segment,
    payload_bytes,
)

MU, SATURATED = "mu", "saturated"
"""Names in the state: μ, shared; this rank's share of saturated entries, private."""
SATURATED_LIMIT = 1e-5
"""Share of saturated entries from which on μ is halved (FP8-LM: 0.001 %)."""
RECOVERY = 2.0 ** (1 / 1000)
"""Factor of μ in any other call: twofold in 1000 calls (FP8-LM)."""
SPARE = 4.0
"""What entries of a mean are divided by besides a power of two: rounding may enlarge sums."""
_LARGEST_BFLOAT16 = 0x7F7F0000


@compressor_registry.register
class MXCompressor(Compressor):
    """MXFP8, MXFP6 and MXFP4 of the OCP Microscaling Formats Specification v1.0, at every hop.

    A payload has 8.25, 6.25 or 4.25 bits per entry: packed codes, then one E8M0 scale for every
    block of 32. Each hop decodes, adds in float32 and encodes again. For a mean, entries are
    divided by a power of two, at least 4 n, before the first hop and by what is left at the end, so
    that no mean overflows.

    With the scale rule "ceil" and stochastic rounding, or with prescaled rounding, every hop is
    unbiased while scales are its own; nearest rounding is not, nor is "floor" where it saturates.

    Scales for all hops at once ("shared") come from the largest magnitude of each block over all
    ranks, a statistic of one bfloat16 per block, rounded up: half a bit more per entry, or a bit in
    a reduce-scatter, where statistics cross twice, too. They leave
    head-room: n times that magnitude, divided by μ from 1 to n, becomes the largest element. μ is
    halved after a call in which more than 0.001 % of some rank's entries came to the largest
    element, and else grows twofold in 1000 calls (FP8-LM, arXiv 2310.18313, section 2.1). In a
    reduce-scatter each rank counts what it holds at the end. A call with non-finite entries leaves
    μ alone.

    Codes are a function of the entries and, unless rounding is to nearest, of the call's address.
    Contamination unit: the block of 32 entries, with FP8 elements too: a NaN, an infinity, or a
    sum beyond float32 sets the block's scale to NaN.

    Attributes:
        format: Of the elements.
        scale_rule: "floor": ⌊log2 max⌋ - emax, as the specification says: what lies above the
            largest element saturates. "ceil": the smallest scale at which nothing does.
        rounding: "nearest": ties to even. "stochastic": to a neighbour with probability by
            distance. "prescaled": that of 3/4 of each value, undone by the decoder, so that the
            floor rule does not saturate (Tseng et al. 2025, arXiv 2502.20586).
        scale_scope: "per_hop" or "shared".
    """

    kind: Literal["mx"] = "mx"
    format: Name = "mxfp8_e4m3"
    scale_rule: ScaleRule = "floor"
    rounding: Rounding = "nearest"
    scale_scope: Literal["per_hop", "shared"] = "per_hop"

    def __init__(self, format: Name = "mxfp8_e4m3", **data: Any) -> None:
        """Choose the elements."""
        super().__init__(**{"format": format, **data})

    @property
    def stateful(self) -> bool:
        """Whether μ is carried on."""
        return self.scale_scope == "shared"

    @property
    def needs_key(self) -> bool:
        """Never: without a key, each call has room for all ranks."""
        return False

    def unit(self, numel: int, world_size: int) -> int:
        """What a team of a kernel's threads works on: 8 blocks."""
        return SUPERGROUP

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics | None:
        """Return the largest magnitude of every block, and this rank's saturated share."""
        if self.scale_scope == "per_hop":
            return None
        every = layout.pad(x, torch.float32).view(-1, BLOCKS, BLOCK).abs_().amax(2)
        own = every[Supergroups.of(layout, x.device).real].view(-1) / divisors(call)[0]
        saturated = state.private.get(SATURATED, own.new_zeros(()))
        values = rounded_up_to_bfloat16(torch.cat([own, saturated.view(1)]))
        return Statistics(values, "max", "bf16")  # exact, for these are bfloat16 numbers

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "MXEncoding":
        """Choose the scales, if they are shared."""
        quantizer = Quantizer(ELEMENTS[self.format], self.scale_rule, self.rounding)
        if statistics is None:
            return MXEncoding(layout, call, quantizer)
        supergroups = Supergroups.of(layout, statistics.device)
        largest = statistics.new_zeros(len(supergroups.counts), BLOCKS)
        largest[supergroups.real] = statistics[:-1].view(-1, BLOCKS)
        maxima = torch.cat([largest.view(-1), statistics[-1:]])
        shared = SharedScales(maxima, quantizer, schedule.world_size, state)
        return MXEncoding(layout, call, quantizer, shared)

    def next_state(self, encoding: "MXEncoding", work: Tensor) -> State:
        """Return μ and this rank's saturated share, or what a non-finite call began with."""
        if encoding.shared is None:
            return State()
        return encoding.shared.next_state(work, encoding.layout.numel)


def divisors(call: Call) -> tuple[float, float]:
    """Return what entries are divided by before the first hop, a power of two, and at the end."""
    if call.divisor == 1:
        return 1.0, 1.0
    first, rest = split_divisor(call.divisor)
    return SPARE * first, rest / SPARE


def rounded_up_to_bfloat16(x: Tensor) -> Tensor:
    """Return x[k] >= 0 rounded up to bfloat16 numbers, as float32; to no more than the largest."""
    bits = x.view(torch.int32)
    up = ((bits + 0xFFFF) & -0x10000).clamp(max=_LARGEST_BFLOAT16)
    return torch.where(x.isfinite(), up, bits).view(torch.float32)


class SharedScales:
    """The scales of one call for all of its hops.

    Attributes:
        scales: uint8[8 n p], one for every block of the padded bucket.
        mu: float32[], by how much the range is used beyond what is safe for any n ranks.
    """

    def __init__(self, statistics: Tensor, quantizer: Quantizer, ranks: int, state: State) -> None:
        """Follow the reduced statistics float32[8 n p + 1]."""
        largest, saturated = statistics[:-1], statistics[-1]
        self._quantizer = quantizer
        one, zero = saturated.new_ones(()), saturated.new_zeros(())
        self._before = state.shared.get(MU, one), state.private.get(SATURATED, zero)
        mu = self._before[0]
        if MU in state.shared:
            mu = torch.where(saturated > SATURATED_LIMIT, mu * 0.5, mu * RECOVERY)
        self.mu = mu.clamp(1.0, float(ranks))
        self._finite = statistics.isfinite().all()
        bound = largest * (torch.full_like(mu, ranks) / self.mu)
        bound = bound.clamp(max=torch.finfo(torch.float32).max)
        scales = reference.scale_of(bound.view(torch.int32), quantizer)
        self.scales = torch.where(largest.isfinite(), scales, NAN_SCALE).to(torch.uint8)

    def next_state(self, work: Tensor, entries: int) -> State:
        """Count in the working buffer, float32[n, p * 256], what reached the largest element."""
        at_most = reference.largest_of(self.scales.int(), self._quantizer)
        count = (work.view(-1, BLOCK).abs() >= at_most[:, None]).sum()
        saturated = count.to(torch.float32) / entries
        mu, before = self._before
        return State(
            shared={MU: torch.where(self._finite, self.mu, mu)},
            private={SATURATED: torch.where(self._finite, saturated, before)},
        )


class MXEncoding(PaddedEncoding):
    """Blocks to codes and scales, and back."""

    def __init__(
        self,
        layout: Layout,
        call: Call,
        quantizer: Quantizer,
        shared: SharedScales | None = None,
    ) -> None:
        """Bind to a layout, a call and a format."""
        super().__init__(layout, call)
        self.quantizer = quantizer
        self.shared = shared
        self._first_divisor, self.divisor = divisors(call)

    def payload_bytes(self, message: Message, positions: range) -> int:
        """Return the bytes of the blocks that hold true entries."""
        start, stop = self._span(message.chunk, positions)
        return payload_bytes(self.quantizer.element, stop - start)

    def load(self, x: Tensor, rank: int, out: Tensor) -> Tensor:
        """Copy and scale into range."""
        return super().load(x, rank, out).div_(self._first_divisor)

    def compress(self, work: Tensor, message: Message, positions: range, out: Tensor) -> None:
        """Write codes and scales."""
        segment = self._segment(message, positions)
        if segment.blocks:
            ops.compress(self._values(work, segment), segment, self.quantizer, out)

    def decompress(self, payload: Tensor, work: Tensor, message: Message, positions: range) -> None:
        """Replace blocks."""
        segment = self._segment(message, positions)
        if segment.blocks:
            ops.decompress(payload, self._values(work, segment), segment, self.quantizer)

    def decompress_accumulate(
        self, payload: Tensor, work: Tensor, message: Message, positions: range
    ) -> None:
        """Add to blocks."""
        segment = self._segment(message, positions)
        if segment.blocks:
            values = self._values(work, segment)
            ops.decompress_accumulate(payload, values, segment, self.quantizer)

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: Tensor,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        """From payload to payload; the sum is not kept."""
        segments = self._segment(incoming, positions), self._segment(outgoing, positions)
        if segments[0].blocks:
            values = self._values(work, segments[0])
            ops.decompress_accumulate_recompress(payload, values, segments, self.quantizer, out)

    def store(self, work: Tensor, out: Tensor, chunk: int | None = None) -> None:
        """Divide and copy out; a mean that was rounded beyond float32 becomes its largest."""
        if self.divisor < 1.0:
            part = work if chunk is None else work[chunk]
            limit = torch.finfo(torch.float32).max * self.divisor * (1 - 2.0**-20)
            part.clamp_(-limit, limit)
        super().store(work, out, chunk)

    def _segment(self, message: Message, positions: range) -> Segment:
        start, stop = self._span(message.chunk, positions)
        address = (message.hop, message.sender)
        key = randomness.key(self.call.seed, self.call.number, Stream.ENTRY, *address)
        first = message.chunk * self.positions + positions.start
        segment = Segment(-(-(stop - start) // BLOCK), first, key)
        if self.shared is None:
            return segment
        scales = self.shared.scales[BLOCKS * first : BLOCKS * (first + segment.supergroups)]
        return Segment(segment.blocks, first, key, scales)

    def _values(self, work: Tensor, segment: Segment) -> Tensor:
        """Return a segment's part of the working buffer, float32[s, 256]."""
        rows = work.view(-1, SUPERGROUP)
        return rows[segment.first : segment.first + segment.supergroups]
