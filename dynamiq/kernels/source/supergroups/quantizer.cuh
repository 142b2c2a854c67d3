// Values to codes and back (DynamiQ §3.3), bit for bit as dynamiq/kernels/supergroups/reference.py.
#pragma once

#include "randomness.cuh"
#include "wire.cuh"

enum Rounding { NEAREST, STOCHASTIC, CORRELATED, DITHERED };
enum GroupScales { NO_GROUP_SCALES, STOCHASTICALLY, UP };

struct Quantizer {
    Widths widths;
    const float* tables;
    int32_t rounding;      // of entries
    int32_t group_scales;  // whether there are any, and how they are rounded

    INLINE_MEMBER int group_scale_bytes() const { return group_scales == NO_GROUP_SCALES ? 0 : 16; }
};

INLINE Place place_of(const Tiles& tiles, const Quantizer& quantizer, int64_t index) {
    return place_of(tiles, quantizer.widths, quantizer.group_scale_bytes(), index);
}

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

// The rounding thresholds of all entries, or their dithers + 1/2, in (0, 1).
INLINE Supergroup<floats> thresholds(const Quantizer& quantizer, const Address& address,
                                     int64_t unit) {
    Supergroup<floats> u;
    if (quantizer.rounding == NEAREST) {
        FOR_EACH_GROUP(g) u[g] = sixteen(0.5f);
        return u;
    }
    BlockKey key = block_key(address.entries, unit);
    FOR_EACH_GROUP(g) u[g] = uniform(random_words(key, entry_lanes(g)));
    if (quantizer.rounding != CORRELATED) return u;
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

INLINE int32_t rounded_up_to_bfloat16(int32_t bits) {
    return (bits + 0xFFFF) & (int32_t)0xFFFF0000;
}

INLINE Scales scales_of(const group_ints& largest_bits, const Quantizer& quantizer,
                        const Address& address, int64_t unit) {
    Scales scales;
    scales.scale = rounded_up_to_bfloat16(largest_of_groups(largest_bits));
    float scale = float_of_bits(scales.scale);
    group_floats largest = float_of_bits(largest_bits);
    group_floats ratio = largest * 255.0f / (scale > 0.0f ? scale : 1.0f);
    group_floats zero = ratio * 0.0f, one = zero + 1.0f;
    group_floats low = to_float(to_int(ratio)), up = low + 1.0f;
    if (quantizer.group_scales == UP) {
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

// |x| / divisor, at most 1.
INLINE floats ratio_of(const floats& x, float divisor) {
    floats ratio = float_of_bits(magnitude_bits(x)) / divisor;
    return select(ratio > 1.0f, sixteen(1.0f), ratio);
}

// The codes of a group of entries: the level below or above, in value space, so that correlated
// errors of opposite signs do not reinforce.
INLINE ints quantized(const floats& x, float divisor, const Width& width, const float* tables,
                      floats u) {
    floats ratio = ratio_of(x, divisor);
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

// What dithered codes are made with, and what turns them back: dynamiq/kernels/supergroups/dither.py.
struct Expansion {
    float half, alpha, kappa;
};

INLINE Expansion expansion_of(const Width& width, const Quantizer& quantizer) {
    const float* numbers = quantizer.tables + width.values;
    return {numbers[0], numbers[1], numbers[2]};
}

// The z in [-1, 1] with 0.6 z + 0.4 z^3 = t, by two steps of Newton's method.
INLINE floats companded(const floats& t) {
    floats z = t / (float_of_bits(bits_of(t) & 0x7FFFFFFF) * 0.4f + 0.6f);
    UNROLL for (int i = 0; i < 2; ++i) {
        floats square = z * z;
        z = (square * z * 2.0f + t * 2.5f) / (square * 3.0f + 1.5f);
    }
    return z;
}

INLINE ints dithered_codes(const floats& x, float divisor, const Width& width,
                           const Expansion& expansion, const floats& u) {
    floats ratio = ratio_of(x, divisor);
    ints sign = bits_of(x) & (int32_t)0x80000000;
    floats t = float_of_bits(bits_of(ratio) | select(x < 0.0f, sign, sign ^ sign));
    ints code = to_int(companded(t) * expansion.half + expansion.half + u);
    int top = (1 << width.bits()) - 1;
    code = select(code > top, sixteen(top), code);
    return select(code < 0, sixteen(0), code);
}

INLINE floats dithered_values(const ints& codes, const Expansion& expansion, const floats& u) {
    floats y = (to_float(codes) - expansion.half) + (0.5f - u);
    return y * (y * y * expansion.kappa + expansion.alpha);
}

// The codes of a supergroup. Templates, so that loops over groups have no branches.
template <bool dithered, bool grouped>
INLINE void write_codes(const Supergroup<floats>& x, float scale, const group_floats& divisors,
                        const Place& place, const Width& width, const Quantizer& quantizer,
                        const Address& address, uint16_t* codes, const Ahead& ahead) {
    const int bits = width.bits();
    if (dithered) {
        const Expansion expansion = expansion_of(width, quantizer);
        BlockKey key = block_key(address.entries, place.unit);
        FOR_EACH_GROUP(g) {
            floats u = uniform(random_words(key, entry_lanes(g)));
            float divisor = grouped ? of_group(divisors, g) : scale;
            pack(dithered_codes(x[g], divisor, width, expansion, u), bits, codes + bits * g);
            ahead.fetch(g);
        }
    } else {
        const float* tables = quantizer.tables;
        Supergroup<floats> u = thresholds(quantizer, address, place.unit);
        FOR_EACH_GROUP(g) {
            float divisor = grouped ? of_group(divisors, g) : scale;
            pack(quantized(x[g], divisor, width, tables, u[g]), bits, codes + bits * g);
            ahead.fetch(g);
        }
    }
}

template <bool dithered, bool grouped>
INLINE void read_codes(const uint16_t* codes, float scale, const group_floats& scales,
                       const Place& place, const Width& width, const Quantizer& quantizer,
                       const Address& address, Supergroup<floats>& x) {
    const int bits = width.bits();
    if (dithered) {
        const Expansion expansion = expansion_of(width, quantizer);
        BlockKey key = block_key(address.entries, place.unit);
        FOR_EACH_GROUP(g) {
            floats u = uniform(random_words(key, entry_lanes(g)));
            ints group = unpack(codes + bits * g, bits);
            x[g] = dithered_values(group, expansion, u) * (grouped ? of_group(scales, g) : scale);
        }
    } else {
        const float* values = quantizer.tables + width.values;
        FOR_EACH_GROUP(g) {
            ints group = unpack(codes + bits * g, bits);
            x[g] = lookup(values, 1 << bits, group) * (grouped ? of_group(scales, g) : scale);
        }
    }
}

#define CHOOSE(dithered, grouped, function, ...)                                                  \
    if (dithered) {                                                                               \
        if (grouped) function<true, true>(__VA_ARGS__);                                           \
        else function<true, false>(__VA_ARGS__);                                                  \
    } else {                                                                                      \
        if (grouped) function<false, true>(__VA_ARGS__);                                          \
        else function<false, false>(__VA_ARGS__);                                                 \
    }

// Write a supergroup's part of a payload.
INLINE void encode(const Supergroup<floats>& x, const Place& place, const Quantizer& quantizer,
                   const Address& address, uint8_t* payload, const Ahead& ahead) {
    FOR_EACH_PART(i, place.slack_end - place.slack) payload[place.slack + i] = 0;
    if (!place.width) return;
    const Width width = *place.width;  // not read again after each byte that is written
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
        const bool grouped = quantizer.group_scales != NO_GROUP_SCALES;
        Scales scales = {};
        if (grouped) {
            scales = scales_of(largest_of_each(magnitudes), quantizer, address, place.unit);
            write_bytes(payload + place.group_scales, to_int(scales.codes));
        } else {
            scales.scale = rounded_up_to_bfloat16(largest_of_all(magnitudes));
        }
        float scale = float_of_bits(scales.scale);
        scale = scale > 0.0f ? scale : 1.0f;
        CHOOSE(quantizer.rounding == DITHERED, grouped, write_codes, x, scale, scales.divisor, place,
               width, quantizer, address, codes.words, ahead)
        uint16_t bfloat16 = (uint16_t)((uint32_t)scales.scale >> 16);
        if (is_speaker()) copy_word(payload + place.scale, bfloat16);
    }
    synchronize();
    copy(payload + place.codes, (const uint8_t*)codes.words, code_bytes(width.bits()));
}

// Read a supergroup's part of a payload; zeros if it has none.
INLINE Supergroup<floats> decode(const Place& place, const Quantizer& quantizer,
                                 const Address& address, const uint8_t* payload) {
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
    const bool grouped = quantizer.group_scales != NO_GROUP_SCALES;
    group_floats scales = {};
    if (grouped) scales = decoded_scale(scale, to_float(bytes_at(payload + place.group_scales)));
    CHOOSE(quantizer.rounding == DITHERED, grouped, read_codes, codes.words, scale, scales, place,
           width, quantizer, address, x)
    return x;
}
#undef CHOOSE
