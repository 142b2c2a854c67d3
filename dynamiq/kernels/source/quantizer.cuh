// Values to codes and back (DynamiQ §3.3), bit for bit as dynamiq/kernels/reference.py.
#pragma once

#include "randomness.cuh"
#include "wire.cuh"

enum Rounding { NEAREST, STOCHASTIC, CORRELATED };

struct Quantizer {
    Widths widths;
    const float* tables;
    int32_t rounding;        // of entries
    int32_t scales_round_up; // or else stochastically
};

// What a message's random numbers are a function of, besides the entry.
struct Address {
    uint64_t entries;       // key of this sender's words for entries
    uint64_t group_scales;  // key of its words for group scales
    uint64_t strata;        // key that all senders share, before the pair of ranks is folded in
    int32_t sender, world_size;
};

// What entries beyond this magnitude, and NaN, are taken for, so that everything below stays finite.
#define LARGEST_MAGNITUDE 0x7B000000  // 2^119

INLINE ints magnitude_bits(const floats& x) {
    ints magnitude = bits_of(x) & 0x7FFFFFFF;
    return select(magnitude > LARGEST_MAGNITUDE, sixteen(LARGEST_MAGNITUDE), magnitude);
}

// The sender's place in a random permutation of the ranks, another one for every entry: ranks are
// inserted one after the other, rank j at a uniform place among 0 to j.
INLINE Supergroup<ints> strata(const Address& address, int64_t unit) {
    Supergroup<ints> place;
    Supergroup<words> random;
    for (int rank = address.sender; rank < address.world_size; ++rank) {
        bool first = rank == address.sender, drawn = first || rank % 2 == 0;
        BlockKey key = block_key(fold(address.strata, rank / 2), unit);
        FOR_EACH_GROUP(g) {
            if (drawn) random[g] = random_words(key, entry_lanes(g));
            words half = rank % 2 == 0 ? random[g] & 0xFFFFu : random[g] >> 16;
            ints inserted = as_ints(half * (uint32_t)(rank + 1) >> 16);
            place[g] = first ? inserted : select(inserted <= place[g], place[g] + 1, place[g]);
        }
    }
    return place;
}

// The rounding thresholds of all entries, in (0, 1).
INLINE Supergroup<floats> thresholds(const Quantizer& quantizer, const Address& address,
                                     int64_t unit) {
    Supergroup<floats> u;
    if (quantizer.rounding == NEAREST) {
        FOR_EACH_GROUP(g) u[g] = sixteen(0.5f);
        return u;
    }
    BlockKey key = block_key(address.entries, unit);
    FOR_EACH_GROUP(g) u[g] = uniform(random_words(key, entry_lanes(g)));
    if (quantizer.rounding == STOCHASTIC) return u;
    Supergroup<ints> place = strata(address, unit);
    FOR_EACH_GROUP(g) {
        u[g] = (to_float(place[g]) + u[g]) / (float)address.world_size;
        u[g] = select(u[g] < 0x1p-24f, sixteen(0x1p-24f), u[g]);
        u[g] = select(u[g] > 1.0f - 0x1p-24f, sixteen(1.0f - 0x1p-24f), u[g]);
    }
    return u;
}

// A supergroup's scales.
struct Scales {
    int32_t scale;        // bits of the BF16 scale as float32
    group_floats codes;   // 0 to 255, one of each group
    group_floats divisor; // what entries are divided by
};

INLINE group_floats decoded_scale(float scale, const group_floats& codes) {
    return codes * scale / 255.0f;
}

INLINE Scales scales_of(const group_ints& largest_bits, const Quantizer& quantizer,
                        const Address& address, int64_t unit) {
    Scales scales;
    scales.scale = (largest_of_groups(largest_bits) + 0xFFFF) & (int32_t)0xFFFF0000;
    float scale = float_of_bits(scales.scale);
    group_floats largest = float_of_bits(largest_bits);
    group_floats ratio = largest * 255.0f / (scale > 0.0f ? scale : 1.0f);
    group_floats zero = ratio * 0.0f, one = zero + 1.0f;
    group_floats low = to_float(to_int(ratio)), up = low + 1.0f;
    if (quantizer.scales_round_up) {
        group_floats codes = select(low < ratio, up, low);
        codes = select(codes < 1.0f, one, codes);
        scales.codes = select(largest > 0.0f, codes, zero);
        scales.divisor = decoded_scale(scale, scales.codes);
    } else {
        auto u = uniform(random_words(block_key(address.group_scales, unit), group_numbers()));
        scales.codes = select(u < ratio - low, up, low);
        scales.divisor = largest;
    }
    // An all-zero group: its entries are 0 / 1.
    scales.divisor = select(scales.divisor > 0.0f, scales.divisor, one);
    return scales;
}

// The codes of a group of entries: the level below or above, in value space, so that correlated
// errors of opposite signs do not reinforce.
INLINE ints quantized(const floats& x, float divisor, const Width& width, const float* tables,
                      floats u) {
    floats ratio = float_of_bits(magnitude_bits(x)) / divisor;
    ratio = select(ratio > 1.0f, sixteen(1.0f), ratio);
    ints negative = x < 0.0f;
    if (width.bits() == 1) {
        floats signed_ratio = select(negative, 0.0f - ratio, ratio);
        return select(u < (signed_ratio + 1.0f) * 0.5f, sixteen(1), sixteen(0));
    }
    ints low = sixteen(0);
    floats fraction = ratio;
    if (width.top() > 1) {
        ints cell = to_int(ratio * (float)width.cells());
        cell = select(cell > width.cells() - 1, sixteen(width.cells() - 1), cell);
        low = lookup((const int32_t*)tables + width.starts, width.cells(), cell);
        for (int i = 0; i < width.steps; ++i)
            low = select(ratio >= lookup(tables + width.next, width.top(), low), low + 1, low);
        fraction = (ratio - lookup(tables + width.levels, width.top(), low)) /
                   lookup(tables + width.gaps, width.top(), low);
    }
    u = select(negative, 1.0f - u, u);
    ints index = select(u < fraction, low + 1, low);
    return select(negative, width.top() - index, width.top() + index);
}

// Write a supergroup's part of a payload.
INLINE void encode(const Supergroup<floats>& x, const Place& place, const Quantizer& quantizer,
                   const Address& address, uint8_t* payload, const Ahead& ahead) {
    FOR_EACH_PART(i, place.slack_end - place.slack) payload[place.slack + i] = 0;
    if (!place.width) return;
    const Width width = *place.width;  // not read again after each byte that is written
    const float* tables = quantizer.tables;
    SHARED(Codes, codes);
    expect_writes(payload, place, width.bits());
    if (width.bits() == 16) {
        FOR_EACH_GROUP(g) {
            words random = random_words(block_key(address.entries, place.unit), entry_lanes(g));
            pack(stochastic_bfloat16(x[g], random), 16, codes.words + 16 * g);
            ahead.fetch(g);
        }
    } else {
        Supergroup<ints> magnitudes;
        FOR_EACH_GROUP(g) magnitudes[g] = magnitude_bits(x[g]);
        Scales scales =
            scales_of(largest_of_each(magnitudes), quantizer, address, place.unit);
        Supergroup<floats> u = thresholds(quantizer, address, place.unit);
        FOR_EACH_GROUP(g) {
            float divisor = of_group(scales.divisor, g);
            ints group = quantized(x[g], divisor, width, tables, u[g]);
            pack(group, width.bits(), codes.words + width.bits() * g);
            ahead.fetch(g);
        }
        write_bytes(payload + place.group_scales, to_int(scales.codes));
        uint16_t scale = (uint16_t)((uint32_t)scales.scale >> 16);
        if (is_speaker()) copy_word(payload + place.scale, scale);
    }
    synchronize();
    copy(payload + place.codes, (const uint8_t*)codes.words, code_bytes(width.bits()));
}

// Read a supergroup's part of a payload; zeros if it has none.
INLINE Supergroup<floats> decode(const Place& place, const Quantizer& quantizer,
                                 const uint8_t* payload) {
    Supergroup<floats> x;
    if (!place.width) {
        FOR_EACH_GROUP(g) x[g] = sixteen(0.0f);
        return x;
    }
    const Width width = *place.width;
    SHARED(Codes, codes);
    copy((uint8_t*)codes.words, payload + place.codes, code_bytes(width.bits()));
    synchronize();
    if (width.bits() == 16) {
        FOR_EACH_GROUP(g) {
            ints upper;
            UNROLL for (int i = 0; i < 16; ++i) upper[i] = codes.words[16 * g + i];
            x[g] = float_of_bits(upper << 16);
        }
        return x;
    }
    float scale = float_of_bits((int32_t)((uint32_t)word_at(payload + place.scale) << 16));
    group_floats group_scales =
        decoded_scale(scale, to_float(bytes_at(payload + place.group_scales)));
    FOR_EACH_GROUP(g) {
        ints group = unpack(codes.words + width.bits() * g, width.bits());
        const float* values = quantizer.tables + width.values;
        x[g] = lookup(values, 1 << width.bits(), group) * of_group(group_scales, g);
    }
    return x;
}
