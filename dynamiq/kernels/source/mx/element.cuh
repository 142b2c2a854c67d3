// Numbers of 8, 6 and 4 bits: codes from float32 and back, as dynamiq/kernels/mx/reference.py says.
#pragma once

#include "hardware.cuh"
#include "randomness.cuh"

enum { NEAREST = 0, STOCHASTIC = 1, PRESCALED = 2 };

// An element format, and how blocks get their scales and entries their codes.
struct Quantizer {
    int32_t element;        // which one, for hardware.cuh
    int32_t bits;           // of a code: 8, 6 or 4
    int32_t mantissa_bits;
    int32_t least;          // the smallest normal number, as bits of float32
    int32_t largest;        // the largest finite one
    int32_t top;            // its code
    int32_t after_top;      // what the code after it stands for: infinity or NaN
    int32_t emax;           // binary exponent of the largest
    int32_t carry;          // added to a block's maximum before its exponent is taken
    int32_t rounding;
};

#define NAN_BITS 0x7FC00000
#define SIGN_BIT ((int32_t)0x80000000)

INLINE ints saturated_magnitude(const floats& y, const Quantizer& q) {
    ints magnitude = bits_of(y) & 0x7FFFFFFF;
    return select(magnitude > q.largest, sixteen(q.largest), magnitude);
}

INLINE ints with_sign_of(const floats& y, const ints& magnitude, const Quantizer& q) {
    return magnitude | (bits_of(y) >> (32 - q.bits) & 1 << (q.bits - 1));
}

// Ties to even: in the number's binade the last bit of `unit` is worth one step of the element's.
INLINE ints nearest_codes(const floats& y, const Quantizer& q) {
#ifdef CONVERTS_FP8
    if (converts(q.element)) return converted_codes(y, q.element);
#endif
    const int shift = 23 - q.mantissa_bits;
    ints magnitude = saturated_magnitude(y, q);
    ints binade = magnitude & 0x7F800000;
    binade = select(binade < q.least, sixteen(q.least), binade);
    ints unit = binade + (shift << 23);
    ints steps = bits_of(float_of_bits(magnitude) + float_of_bits(unit)) - unit;
    return with_sign_of(y, steps + ((binade - q.least) >> shift), q);
}

// To a neighbour with probability by distance: random bits are added below the mantissa. Numbers
// below the normal ones are lifted to them.
INLINE ints stochastic_codes(const floats& y, const words& random, const Quantizer& q) {
    const int shift = 23 - q.mantissa_bits;
    ints magnitude = saturated_magnitude(y, q);
    ints is_small = magnitude < q.least;
    floats lifted = float_of_bits(magnitude) + float_of_bits(q.least);
    lifted = select(is_small, lifted, float_of_bits(magnitude));
    ints steps = (bits_of(lifted) + as_ints(random >> (32 - shift))) >> shift;
    const int32_t first = q.least >> shift;
    ints firsts = select(is_small, sixteen(first), sixteen(first - (1 << q.mantissa_bits)));
    return with_sign_of(y, steps - firsts, q);
}

// What codes stand for. A number below the normal ones is the difference of two normal ones.
INLINE floats values_of_codes(const ints& codes, const Quantizer& q) {
#ifdef CONVERTS_FP8
    if (converts(q.element)) return converted_values(codes, q.element);
#endif
    const int shift = 23 - q.mantissa_bits;
    ints magnitude = codes & ((1 << (q.bits - 1)) - 1);
    ints is_small = magnitude < 1 << q.mantissa_bits;
    ints base = select(is_small, sixteen(q.least), sixteen(q.least - 0x800000));
    floats value = float_of_bits((magnitude << shift) + base);
    value = value - select(is_small, sixteen(float_of_bits(q.least)), sixteen(0.0f));
    if (q.bits == 8) {
        ints beyond = select(magnitude == q.top + 1, sixteen(q.after_top), sixteen(NAN_BITS));
        value = select(magnitude > q.top, float_of_bits(beyond), value);
    }
    return float_of_bits(bits_of(value) | (codes << (32 - q.bits) & SIGN_BIT));
}
