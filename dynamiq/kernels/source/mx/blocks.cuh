// Blocks of 32 entries to codes and scales, and back: 8 blocks of a supergroup at a time.
#pragma once

#include "codes.cuh"
#include "element.cuh"
#include "entries.cuh"

#define BLOCKS 8
#define NAN_SCALE 255

// A payload has the codes of all blocks, then one byte for the scale of each.
struct Segment {
    float* values;          // [supergroups, 256], zeros beyond the last entry
    int64_t blocks;         // with at least one entry; all but the last supergroup have 8
    int64_t first;          // the first supergroup's index in the padded bucket
    uint64_t key;           // of the message's random numbers
    const uint8_t* scales;  // of every block, if they are given, else null
};

// One supergroup of a payload.
struct Place {
    int64_t codes, scales;
    int held;  // blocks
};

INLINE Place place_of(const Segment& segment, const Quantizer& q, int64_t index) {
    const int64_t left = segment.blocks - BLOCKS * index;
    return {index * 32 * q.bits, segment.blocks * 4 * q.bits + BLOCKS * index,
            left < BLOCKS ? (int)left : BLOCKS};
}

// 2^(b - 127) for b from 0 to 254.
template <class G>
INLINE G power_bits(const G& b) {
    return select(b > 0, b << 23, b * 0 + (1 << 22));
}

INLINE group_ints chosen_scales(const group_ints& largest, const Quantizer& q) {
    const group_ints none = {};
    group_ints scale = ((largest + q.carry) >> 23) - q.emax;
    scale = select(scale > 0, scale, none);
    return select(scale < 254 - q.emax, scale, none + (254 - q.emax));
}

template <int rounding>
INLINE void write_codes(const Supergroup<floats>& x, const Segment& segment, const Quantizer& q,
                        int64_t index, const group_floats& inverse, const group_ints& finite,
                        const Place& place, uint8_t* payload) {
    const int bits = q.bits;
    BlockKey key = {};
    if (rounding != NEAREST) key = block_key(segment.key, segment.first + index);
    FOR_EACH_GROUP(g) {
        if (g >= 2 * place.held) continue;
        // What is not finite becomes 0.
        floats y = float_of_bits(bits_of(x[g]) & of_group(finite, g)) * of_group(inverse, g);
        if (rounding == PRESCALED) y = y * 0.75f;
        ints codes = rounding == NEAREST
                         ? nearest_codes(y, q)
                         : stochastic_codes(y, random_words(key, entry_lanes(g)), q);
        pack(codes, bits, payload + place.codes + 2 * bits * g);
    }
}

// Write a supergroup's part of a payload.
INLINE void encode(const Supergroup<floats>& x, const Segment& segment,
                   const Quantizer& quantizer, int64_t index, uint8_t* payload) {
    const Quantizer q = quantizer;  // not read again after each byte that is written
    const Place place = place_of(segment, q, index);
    const group_ints none = {};
    Supergroup<ints> magnitudes;
    FOR_EACH_GROUP(g) magnitudes[g] = bits_of(x[g]) & 0x7FFFFFFF;
    group_ints largest = largest_of_pairs(magnitudes);
    group_ints finite = select(largest < 0x7F800000, none - 1, none);
    group_ints scale = segment.scales
                           ? bytes_of_pairs_at(segment.scales + BLOCKS * index, BLOCKS)
                           : chosen_scales(largest & finite, q);
    finite = select(scale < NAN_SCALE, finite, none);
    scale = select(finite < 0, scale, none + NAN_SCALE);
    write_bytes_of_pairs(payload + place.scales, scale, place.held);
    group_floats inverse = float_of_bits(power_bits(254 - scale));
    switch (q.rounding) {
        case NEAREST:
            return write_codes<NEAREST>(x, segment, q, index, inverse, finite, place, payload);
        case STOCHASTIC:
            return write_codes<STOCHASTIC>(x, segment, q, index, inverse, finite, place, payload);
        default:
            return write_codes<PRESCALED>(x, segment, q, index, inverse, finite, place, payload);
    }
}

// Read a supergroup's part of a payload; zeros where it has no block. NaN need not be canonical.
INLINE Supergroup<floats> decode(const Segment& segment, const Quantizer& q, int64_t index,
                                 const uint8_t* payload) {
    const Place place = place_of(segment, q, index);
    const group_ints none = {};
    group_ints scale = bytes_of_pairs_at(payload + place.scales, place.held);
    group_floats scales = float_of_bits(
        select(scale < NAN_SCALE, power_bits(scale), none + NAN_BITS));
    const bool prescaled = q.rounding == PRESCALED;
    const int bits = q.bits;
    Supergroup<floats> x;
    FOR_EACH_GROUP(g) {
        if (g >= 2 * place.held) {
            x[g] = sixteen(0.0f);
            continue;
        }
        x[g] = values_of_codes(unpack(payload + place.codes + 2 * bits * g, bits), q);
        if (prescaled) x[g] = x[g] * (4.0f / 3.0f);
        x[g] = x[g] * of_group(scales, g);
        if (prescaled) {  // 4/3 of the largest number of a block may lie just beyond float32
            const floats limit = sixteen(0x1.fffffep127f);
            x[g] = select(x[g] > limit, limit, x[g]);
            x[g] = select(x[g] < limit * -1.0f, limit * -1.0f, x[g]);
        }
    }
    return x;
}

INLINE Supergroup<floats> read(const Segment& segment, int64_t index) {
    Supergroup<floats> x;
    FOR_EACH_GROUP(g) x[g] = read_sums(segment.values + 256 * index + 16 * g);
    return x;
}

// What is not finite becomes NaN. Blocks without entries stay zeros.
INLINE void write(const Segment& segment, int64_t index, const Supergroup<floats>& x) {
    FOR_EACH_GROUP(g) {
        ints is_finite = (bits_of(x[g]) & 0x7FFFFFFF) < 0x7F800000;
        floats y = select(is_finite, x[g], sixteen(float_of_bits(NAN_BITS)));
        write_sums(segment.values + 256 * index + 16 * g, y);
    }
}

INLINE void add(Supergroup<floats>& x, const Supergroup<floats>& y) {
    FOR_EACH_GROUP(g) x[g] = x[g] + y[g];
}
