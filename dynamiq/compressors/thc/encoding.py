"""One call of THC: ranges, integers, and how wide they are."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dynamiq.compressors.thc.geometry import Geometry, Part
from dynamiq.core import randomness
from dynamiq.core.arithmetic import rounded
from dynamiq.core.compressor import Encoding, State
from dynamiq.core.errors import InputError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.randomness import Stream
from dynamiq.kernels.hadamard import ops
from dynamiq.kernels.hadamard.operands import (
    UNIT,
    Blocks,
    Finish,
    Quantizer,
    integer_dtype,
    payload_bytes,
    width_of,
)
from dynamiq.kernels.supergroups.operands import entries_of, is_direct

if TYPE_CHECKING:
    from dynamiq.compressors.thc.compressor import THCCompressor

RESIDUAL = "residual"
"""Name of what is owed, in the private state."""
_LARGEST_EXPONENT = 126
"""A power of two and its inverse are both normal float32 numbers up to here."""


@dataclass
class Work:
    """A rank's buffer.

    Attributes:
        codes: Sums of integers, as wide as those of all ranks need: uint8, int16 or int32[units *
            256].
        residual: With error feedback, what this rank owes after the call: float32[d].
    """

    codes: Tensor
    residual: Tensor | None = None


class THCEncoding(Encoding[Work]):
    """Ranges of one call.

    Attributes:
        geometry: Blocks and chunks.
        finite: bool[], whether all norms are.
    """

    sums_exactly = True

    def __init__(
        self,
        compressor: "THCCompressor",
        statistics: Tensor,
        layout: Layout,
        call: Call,
        state: State,
    ) -> None:
        """Derive factors and scales.

        Args:
            compressor: The description.
            statistics: float32[blocks], √‖x‖ of every block, the largest of all ranks.
            layout: How entries are cut into chunks.
            call: Its address.
            state: With error feedback, what this rank owes.
        """
        self.compressor, self.layout, self.call = compressor, layout, call
        self.geometry = Geometry.of(layout)
        self.positions = self.geometry.positions
        self._owed = state.private.get(RESIDUAL)
        norms = statistics.double().square()
        self.finite = norms.isfinite().all()
        self._ranges = [
            _Range.of(norms[p.first_block : p.first_block + p.blocks], p, compressor, self.finite)
            for p in self.geometry.parts
        ]

    def payload_bytes(self, message: Message, positions: range) -> int:
        """As many bits for each entry as the largest sum of the message's ranks needs."""
        units = self.geometry.units_of(message.chunk, positions)
        return payload_bytes(len(units), self._bits(message))

    def load(self, x: Tensor, rank: int, out: Tensor) -> Work:
        """Rotate and round this rank's entries, the only ones that ever are."""
        g, geometry = self.compressor.granularity, self.geometry
        entries = entries_of(corrected(x, self._owed))
        dtype = integer_dtype(g * self.layout.world_size)
        codes = torch.empty(geometry.units * UNIT, dtype=dtype, device=x.device)
        key = randomness.key(self.call.seed, self.call.number, Stream.ENTRY, rank)
        quantizer = Quantizer(key, g, self.compressor.receiver_table)
        for part, ranges in zip(geometry.parts, self._ranges, strict=True):
            if part.blocks:
                blocks = self._blocks(part, ranges.factor, ranges.scale)
                here = entries[part.start : part.stop]
                ops.quantize(here, blocks, quantizer, self._codes(codes, part))
        work = Work(codes)
        if self.compressor.error_feedback:
            work.residual = self._lost(entries.float(), codes)
        return work

    def compress(self, work: Work, message: Message, positions: range, out: Tensor) -> None:
        """See :func:`dynamiq.kernels.hadamard.ops.pack`."""
        ops.pack(self._part(work, message, positions), self._bits(message), out)

    def decompress(self, payload: Tensor, work: Work, message: Message, positions: range) -> None:
        """See :func:`dynamiq.kernels.hadamard.ops.unpack`."""
        ops.unpack(payload, self._bits(message), self._part(work, message, positions))

    def decompress_accumulate(
        self, payload: Tensor, work: Work, message: Message, positions: range
    ) -> None:
        """See :func:`dynamiq.kernels.hadamard.ops.unpack`."""
        ops.unpack(payload, self._bits(message), self._part(work, message, positions), add=True)

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: Work,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        """See :func:`dynamiq.kernels.hadamard.ops.repack`."""
        codes = self._part(work, incoming, positions)
        ops.repack(payload, codes, (self._bits(incoming), self._bits(outgoing)), out)

    def store(self, work: Work, out: Tensor, chunk: int | None = None) -> None:
        """Rotate the sums back, each part once."""
        n, divisor = self.layout.world_size, self.call.divisor
        limit = float("inf")
        if divisor > 1:
            # A mean lies within the dtype's range; its rounded value may not.
            limit = min(torch.finfo(out.dtype).max, torch.finfo(torch.float32).max)
        finish = Finish(self.compressor.granularity * n, float(divisor), limit)
        self._finish(work.codes, finish, out, chunk)

    def _finish(self, codes: Tensor, finish: Finish, out: Tensor, chunk: int | None) -> None:
        target = out if is_direct(out) else torch.empty(out.shape, device=out.device)
        for index, (part, ranges) in enumerate(zip(self.geometry.parts, self._ranges, strict=True)):
            if not part.blocks or chunk not in (None, index):
                continue
            begin = 0 if chunk is None else part.start
            blocks = self._blocks(part, ranges.inverse_factor, ranges.inverse_scale)
            here = target[part.start - begin : part.stop - begin]
            ops.dequantize(self._codes(codes, part), blocks, finish, here)
        if target is not out:
            out.copy_(rounded(target, out.dtype))

    def _lost(self, entries: Tensor, codes: Tensor) -> Tensor:
        """Return float32[d]: entries less what this rank's integers stand for.

        If a norm is not finite, what was owed before; chosen on the device, by all ranks alike.
        """
        sent = torch.empty_like(entries)
        own = Finish(self.compressor.granularity, 1.0, float("inf"))
        self._finish(codes, own, sent, None)
        before = entries.new_zeros(()) if self._owed is None else self._owed
        lost = torch.sub(entries, sent, out=sent)
        return torch.where(self.finite & lost.isfinite().all(), lost, before)

    def _bits(self, message: Message) -> int:
        return width_of(self.compressor.granularity * message.summed)

    def _part(self, work: Work, message: Message, positions: range) -> Tensor:
        units = self.geometry.units_of(message.chunk, positions)
        return work.codes[units.start * UNIT : units.stop * UNIT]

    @staticmethod
    def _codes(codes: Tensor, part: Part) -> Tensor:
        return codes[part.first_unit * UNIT : (part.first_unit + part.units) * UNIT]

    def _blocks(self, part: Part, factor: Tensor, scale: Tensor) -> Blocks:
        signs = randomness.key(self.call.seed, self.call.number, Stream.SIGN)
        return Blocks(part.log_block, part.first_unit, signs, factor, scale)


@dataclass(frozen=True)
class _Range:
    """Of each block of a part: float32[blocks] each."""

    factor: Tensor
    scale: Tensor
    inverse_factor: Tensor
    inverse_scale: Tensor

    @classmethod
    def of(cls, norms: Tensor, part: Part, compressor: "THCCompressor", finite: Tensor) -> "_Range":
        """Derive ranges from the norms float64[blocks].

        Entries are brought near 1 by a power of two before they are rotated, which then can
        neither overflow nor lose what is small. The orthonormal transform's 1/√d is part of the
        scales. Where a norm is not finite anywhere, all results are NaN.
        """
        g, t = compressor.granularity, compressor.clamp
        deviation = norms * 2.0 ** -(part.log_block // 2)
        exponent = (deviation.view(torch.int64) >> 52) - 1023
        exponent = exponent.clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
        inverse_factor = _power_of_two(exponent)
        factor = _power_of_two(-exponent)
        norms = norms * factor.double()
        known = norms.isfinite() & (norms > 0)
        scale = torch.full_like(norms, g / (2 * t)) / torch.where(known, norms, 1.0)
        inverse = norms * (t / (g * 2.0**part.log_block))
        inverse = torch.where(finite, inverse, torch.nan)
        return cls(factor, torch.where(known, scale, 0.0).float(), inverse_factor, inverse.float())


def corrected(x: Tensor, owed: Tensor | None) -> Tensor:
    """Return x[d], or with error feedback float32[d] with what earlier calls owe.

    Raises:
        InputError: What is owed belongs to a tensor of another size.
    """
    if owed is None:
        return x
    if owed.shape != x.shape:
        raise InputError(
            f"a tensor of {x.numel()} entries came with a key under which the errors of "
            f"{owed.numel()} entries are kept; give tensors of different sizes different keys"
        )
    return x.float() + owed


def _power_of_two(exponent: Tensor) -> Tensor:
    """Return 2^exponent as float32 from its bits."""
    return ((exponent + 127) << 23).to(torch.int32).view(torch.float32)
