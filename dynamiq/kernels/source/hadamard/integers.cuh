// Integers of rotated entries: how they are stored, rounded, and packed into payloads.
#pragma once

#include "randomness.cuh"

// Sums of integers, `bytes` (1, 2 or 4) each, none negative.
struct Integers {
    void* memory;
    int32_t bytes;
    int32_t offset;  // twice a sum less this is what rotates back
};

#ifdef __CUDACC__

INLINE ints integers_at(const Integers& a, int64_t at) {
    ints r;
    if (a.bytes == 1) {
        Quad q = *(const Quad*)((const uint8_t*)a.memory + at);
        UNROLL for (int i = 0; i < 16; ++i) r[i] = q.v[i / 4] >> 8 * (i % 4) & 0xFF;
    } else if (a.bytes == 2) {
        const Quad* from = (const Quad*)((const uint16_t*)a.memory + at);
        UNROLL for (int k = 0; k < 2; ++k) {
            Quad q = from[k];
            UNROLL for (int i = 0; i < 8; ++i) r[8 * k + i] = q.v[i / 2] >> 16 * (i % 2) & 0xFFFF;
        }
    } else {
        const Quad* from = (const Quad*)((const uint32_t*)a.memory + at);
        UNROLL for (int k = 0; k < 4; ++k) {
            Quad q = from[k];
            UNROLL for (int i = 0; i < 4; ++i) r[4 * k + i] = q.v[i];
        }
    }
    return r;
}

INLINE void write_integers(const Integers& a, int64_t at, const ints& x) {
    if (a.bytes == 1) {
        Quad q;
        UNROLL for (int k = 0; k < 4; ++k)
            q.v[k] = x[4 * k] | x[4 * k + 1] << 8 | x[4 * k + 2] << 16 | x[4 * k + 3] << 24;
        *(Quad*)((uint8_t*)a.memory + at) = q;
    } else if (a.bytes == 2) {
        Quad* to = (Quad*)((uint16_t*)a.memory + at);
        UNROLL for (int k = 0; k < 2; ++k) {
            Quad q;
            UNROLL for (int i = 0; i < 4; ++i) q.v[i] = x[8 * k + 2 * i] | x[8 * k + 2 * i + 1] << 16;
            to[k] = q;
        }
    } else {
        Quad* to = (Quad*)((uint32_t*)a.memory + at);
        UNROLL for (int k = 0; k < 4; ++k) {
            Quad q;
            UNROLL for (int i = 0; i < 4; ++i) q.v[i] = x[4 * k + i];
            to[k] = q;
        }
    }
}

INLINE int32_t integer_at(const Integers& a, int64_t at) {
    if (a.bytes == 1) return ((const uint8_t*)a.memory)[at];
    if (a.bytes == 2) return ((const uint16_t*)a.memory)[at];
    return ((const int32_t*)a.memory)[at];
}

INLINE void write_integer(const Integers& a, int64_t at, int32_t x) {
    if (a.bytes == 1)
        ((uint8_t*)a.memory)[at] = (uint8_t)x;
    else if (a.bytes == 2)
        ((uint16_t*)a.memory)[at] = (uint16_t)x;
    else
        ((int32_t*)a.memory)[at] = x;
}

#else

typedef uint16_t sixteen_shorts __attribute__((vector_size(32)));

INLINE ints integers_at(const Integers& a, int64_t at) {
    if (a.bytes == 1) return bytes_at((const uint8_t*)a.memory + at);
    ints r;
    if (a.bytes == 2) {
        sixteen_shorts x;
        memcpy(&x, (const uint16_t*)a.memory + at, 32);
        return __builtin_convertvector(x, ints);
    }
    memcpy(&r, (const int32_t*)a.memory + at, 64);
    return r;
}

INLINE void write_integers(const Integers& a, int64_t at, ints x) {
    if (a.bytes == 1) {
        write_bytes((uint8_t*)a.memory + at, x);
    } else if (a.bytes == 2) {
        sixteen_shorts r = __builtin_convertvector(x, sixteen_shorts);
        memcpy((uint16_t*)a.memory + at, &r, 32);
    } else {
        memcpy((int32_t*)a.memory + at, &x, 64);
    }
}

#endif

// What rotates back: exact, but for rounding to float32 beyond 2^24.
template <class I>
INLINE auto centred(const Integers& a, const I& sum) {
    return to_float(sum * 2 - a.offset);
}

// How rotated entries become integers from 0 to `top`.
struct Quantizer {
    uint64_t key;         // of this rank's random numbers
    int64_t first_unit;   // of these entries, in the padded bucket
    const float* lows;    // the integer in use at or below each integer; null if all are in use
    const float* gaps;    // from there to the next one
    int32_t table_size;   // entries of both
    float top;
};

INLINE words random_of_unit(const Quantizer& q, int64_t at) {
    uint32_t lane = (uint32_t)at & 255;
    return random_words(block_key(q.key, q.first_unit + (at >> 8)), counting() + lane);
}

INLINE ints quantize(const Quantizer& q, const floats& rotated, float scale, const words& random) {
    floats v = rotated * scale + q.top * 0.5f;
    v = select(v > 0.0f, v, sixteen(0.0f));
    v = select(v < q.top, v, sixteen(q.top));
    ints below = to_int(v);
    floats low = to_float(below), gap = sixteen(1.0f);
    if (q.lows) {
        low = lookup(q.lows, q.table_size, below);
        gap = lookup(q.gaps, q.table_size, below);
    }
    return to_int(select(v - low > uniform(random) * gap, low + gap, low));
}

#ifndef __CUDACC__
// Room for what the stores below write beyond the last group.
struct Packed {
    uint8_t bytes[32 * 32 + 16];
};
#endif

// Write 16 integers as 16 · bits bits, the first one lowest; up to 32 bits.
INLINE void pack(const ints& codes, int bits, uint16_t* out) {
#ifndef __CUDACC__
    if (bits <= 8) {  // two integers of `bits` bytes; what the stores add is overwritten later
        uint64_t fours[4];
        join_fours(codes, bits, fours);
        uint64_t low = fours[0] | fours[1] << 4 * bits, high = fours[2] | fours[3] << 4 * bits;
        memcpy(out, &low, 8);
        memcpy((uint8_t*)out + bits, &high, 8);
        return;
    }
#endif
    uint64_t pending = 0;
    int held = 0;
    UNROLL for (int i = 0; i < 16; ++i) {
        pending |= (uint64_t)(uint32_t)codes[i] << held;
        for (held += bits; held >= 16; held -= 16) {
            *out++ = (uint16_t)pending;
            pending >>= 16;
        }
    }
}

// Undo `pack`.
INLINE ints unpack(const uint16_t* in, int bits) {
#ifndef __CUDACC__
    if (bits <= 8) {
        uint64_t low, high;
        memcpy(&low, in, 8);
        memcpy(&high, (const uint8_t*)in + bits, 8);
        return split_eights(low, high, bits);
    }
#endif
    ints codes;
    uint64_t pending = 0, mask = ((uint64_t)1 << bits) - 1;
    int held = 0;
    UNROLL for (int i = 0; i < 16; ++i) {
        for (; held < bits; held += 16) pending |= (uint64_t)*in++ << held;
        codes[i] = (int32_t)(pending & mask);
        pending >>= bits;
        held -= bits;
    }
    return codes;
}
