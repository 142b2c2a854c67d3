"""The operations in plain torch, written to be read: the specification of every other build.

Kernel-shaped: one supergroup is 8 blocks of 32 entries; only +, -, x, comparisons and integer
operations on the bits of float32, each rounded to nearest, so that a kernel can give the same bits.
Formulas: OCP MX v1.0, section 6.3 (conversion) and section 5.3 (element formats).
"""

import torch
from torch import Tensor

from dynamiq.core import randomness
from dynamiq.kernels.mx.wire import (
    BLOCK,
    NAN_SCALE,
    PRESCALE,
    SUPERGROUP,
    Element,
    Quantizer,
    Segment,
)

_INFINITY = 0x7F800000
_MANTISSA = 0x7FFFFF
UNDO_PRESCALE = 1.3333333730697632
"""What decoded elements of the prescaled rounding are multiplied by: the float32 next to 4/3."""


def compress(values: Tensor, segment: Segment, quantizer: Quantizer, out: Tensor) -> None:
    """Write the payload of partial sums.

    A block with a NaN or an infinity gets the scale 255 and zeros for codes. Magnitudes beyond the
    element's largest become its largest.

    Args:
        values: float32[s, 256], zeros beyond the last entry.
        segment: How many blocks are sent, and their address.
        quantizer: Element, rule, rounding.
        out: uint8[blocks * (block_bytes + 1)], written in full.
    """
    element, held = quantizer.element, segment.blocks
    x = values.view(-1, BLOCK)[:held]
    largest = (x.view(torch.int32) & 0x7FFFFFFF).amax(1)
    scales = segment.scales
    scale = scale_of(largest, quantizer) if scales is None else scales[:held].int()
    scale = torch.where(largest < _INFINITY, scale, NAN_SCALE)
    y = torch.where((scale != NAN_SCALE)[:, None], x, 0.0) * _power(254 - scale)[:, None]
    if quantizer.rounding == "nearest":
        codes = nearest_codes(y, element)
    else:
        if quantizer.rounding == "prescaled":
            y = y * PRESCALE
        codes = stochastic_codes(y, _words(segment, values), element)
    at = held * element.block_bytes
    out[:at] = pack(codes.view(-1), element.bits)
    out[at:] = scale.to(torch.uint8)


def decompress(payload: Tensor, values: Tensor, segment: Segment, quantizer: Quantizer) -> None:
    """Replace the blocks of float32[s, 256] that the payload holds; infinities become NaN."""
    own = values.view(-1, BLOCK)[: segment.blocks]
    own.copy_(_finite_or_nan(decoded(payload, segment, quantizer)))


def decompress_accumulate(
    payload: Tensor, values: Tensor, segment: Segment, quantizer: Quantizer
) -> None:
    """Add the payload's blocks to those of float32[s, 256]; sums that are not finite become NaN."""
    own = values.view(-1, BLOCK)[: segment.blocks]
    own.copy_(_finite_or_nan(own + decoded(payload, segment, quantizer)))


def decompress_accumulate_recompress(
    payload: Tensor,
    values: Tensor,
    segments: tuple[Segment, Segment],
    quantizer: Quantizer,
    out: Tensor,
) -> None:
    """Write the payload of values + payload; the segments are the incoming and the outgoing one.

    The sums themselves are not kept.
    """
    incoming, outgoing = segments
    sums = values.clone()
    decompress_accumulate(payload, sums, incoming, quantizer)
    compress(sums, outgoing, quantizer, out)


def scale_of(largest: Tensor, quantizer: Quantizer) -> Tensor:
    """Return the scale bytes int32[...] of blocks from the bits int32[...] of their maxima.

    At the upper end of float32 the scale is the largest with which no element overflows, so that
    what is decoded is always finite; there even the ceil rule saturates.
    """
    element = quantizer.element
    exponent = (largest + carry_of(quantizer)) >> 23
    return (exponent - element.emax).clamp(0, 254 - element.emax)


def least_bits(element: Element) -> int:
    """Return the bits of the element's smallest normal number as float32."""
    return (element.emin + 127) << 23


def largest_bits(element: Element) -> int:
    """Return the bits of the element's largest number as float32."""
    return (element.top << (23 - element.mantissa_bits)) + ((element.emin + 126) << 23)


def carry_of(quantizer: Quantizer) -> int:
    """Return what is added to the bits of a maximum before its exponent is taken.

    With the ceil rule a mantissa beyond that of the element's largest number carries.
    """
    if quantizer.scale_rule == "floor":
        return 0
    return _MANTISSA - (largest_bits(quantizer.element) & _MANTISSA)


def largest_of(scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Return what the largest element stands for with scale bytes int32[...]; 255 gives NaN."""
    top = torch.full_like(scale, quantizer.element.top)
    return _scaled(values_of_codes(top, quantizer.element), scale, quantizer)


def nearest_codes(y: Tensor, element: Element) -> Tensor:
    """Return the codes int32[...] of float32[...]: ties to even, saturating."""
    shift, least = 23 - element.mantissa_bits, least_bits(element)
    magnitude = _magnitude(y, element)
    binade = (magnitude & _INFINITY).clamp(min=least)
    # In this number's binade the last bit is worth one step of the element's.
    unit = binade + (shift << 23)
    steps = (_floats(magnitude) + _floats(unit)).view(torch.int32) - unit
    return _signed(steps + ((binade - least) >> shift), y, element)


def stochastic_codes(y: Tensor, words: Tensor, element: Element) -> Tensor:
    """Return the codes int32[...] of float32[...]: to a neighbour, by random words int32[...].

    The upper bits of a word, as many as the element's mantissa lacks, are added to the mantissa,
    and its lower bits are cut off. Numbers below the element's normal ones are lifted to them.
    """
    shift, least = 23 - element.mantissa_bits, least_bits(element)
    magnitude = _magnitude(y, element)
    small = magnitude < least
    lifted = torch.where(small, _floats(magnitude) + 2.0**element.emin, _floats(magnitude))
    random = (words >> (32 - shift)) & ((1 << shift) - 1)
    steps = (lifted.view(torch.int32) + random) >> shift
    first = torch.where(small, least >> shift, (least >> shift) - (1 << element.mantissa_bits))
    return _signed(steps - first, y, element)


def values_of_codes(codes: Tensor, element: Element) -> Tensor:
    """Return what codes int32[...] stand for, as float32[...]."""
    shift, least = 23 - element.mantissa_bits, least_bits(element)
    magnitude = codes & ((1 << (element.bits - 1)) - 1)
    small = magnitude < 1 << element.mantissa_bits
    # A number below the normal ones is the difference of two normal ones.
    bits = (magnitude << shift) + torch.where(small, least, least - (1 << 23))
    value = _floats(bits) - torch.where(small, 2.0**element.emin, 0.0)
    beyond = torch.where(
        (magnitude == element.top + 1) & element.has_infinity, torch.inf, torch.nan
    )
    value = torch.where(magnitude > element.top, beyond, value)
    return torch.where(codes >> (element.bits - 1) != 0, -value, value)


def decoded(payload: Tensor, segment: Segment, quantizer: Quantizer) -> Tensor:
    """Return what a payload holds, float32[blocks, 32], every NaN the same one."""
    element, held = quantizer.element, segment.blocks
    at = held * element.block_bytes
    x = values_of_codes(unpack(payload[:at], element.bits), element).view(held, BLOCK)
    return _scaled(x, payload[at:].int()[:, None], quantizer)


def _scaled(x: Tensor, scale: Tensor, quantizer: Quantizer) -> Tensor:
    """Return elements float32[...] times their scales, every NaN the same one."""
    if quantizer.rounding == "prescaled":
        x = x * UNDO_PRESCALE
    x = x * _power(scale)
    if quantizer.rounding == "prescaled":
        # 4/3 of the largest number of a block may lie just beyond float32.
        limit = torch.finfo(torch.float32).max
        x = x.clamp(-limit, limit)
    return torch.where(x.isnan() | (scale == NAN_SCALE), torch.nan, x)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return codes int32[32 k] of 8, 6 or 4 bits as uint8[...], the first one lowest."""
    if bits == 8:
        return codes.to(torch.uint8)
    per_word = 4 if bits == 6 else 2
    groups = codes.view(-1, per_word)
    word = groups[:, 0].clone()
    for i in range(1, per_word):
        word |= groups[:, i] << i * bits
    nbytes = per_word * bits // 8
    return torch.stack([(word >> 8 * i).to(torch.uint8) for i in range(nbytes)], 1).view(-1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo :func:`pack`."""
    wide = packed.int()
    if bits == 8:
        return wide
    per_word = 4 if bits == 6 else 2
    nbytes = per_word * bits // 8
    columns = wide.view(-1, nbytes)
    word = columns[:, 0].clone()
    for i in range(1, nbytes):
        word |= columns[:, i] << 8 * i
    mask = (1 << bits) - 1
    return torch.stack([(word >> i * bits) & mask for i in range(per_word)], 1).view(-1)


def _finite_or_nan(x: Tensor) -> Tensor:
    """Return x[...] with one and the same NaN for what is not finite."""
    return torch.where(x.isfinite(), x, torch.nan)


def _magnitude(y: Tensor, element: Element) -> Tensor:
    """Return the bits of |y|, and those of the element's largest number for all beyond it."""
    return (y.view(torch.int32) & 0x7FFFFFFF).clamp(max=largest_bits(element))


def _signed(magnitude: Tensor, y: Tensor, element: Element) -> Tensor:
    """Return codes of magnitudes with the signs of y."""
    negative = y.view(torch.int32) < 0
    return magnitude | torch.where(negative, 1 << (element.bits - 1), 0)


def _words(segment: Segment, values: Tensor) -> Tensor:
    """Return the random words of the segment's blocks, int32[blocks, 32]."""
    units = torch.arange(segment.first, segment.first + segment.supergroups, device=values.device)
    words = randomness.words(segment.key, units, SUPERGROUP)
    return words.view(-1, BLOCK)[: segment.blocks]


def _power(biased: Tensor) -> Tensor:
    """Return 2^(b - 127) for int32 b from 0 to 254."""
    return _floats(torch.where(biased > 0, biased << 23, 1 << 22))


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)
