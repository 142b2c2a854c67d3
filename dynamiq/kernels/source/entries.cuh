// Entries of a flat tensor as float32, 256 at a time, and partial sums.
#pragma once

#include "team.cuh"

#if defined(ENTRY_FP32)
typedef float Entry;
#elif defined(ENTRY_BF16) || defined(ENTRY_FP16)
typedef uint16_t Entry;
#else
#error "define ENTRY_FP32, ENTRY_BF16 or ENTRY_FP16"
#endif

// Up to 256 entries that lie together.
struct Extent {
    Entry* entries;
    int count;     // true entries, 0 to 256
    bool aligned;  // full, and at an address that is a multiple of 16
};

#ifdef __CUDACC__

// Sixteen sums, at a multiple of 64 bytes.
INLINE floats read_sums(const float* sums) {
    union {
        Quad quads[4];
        float values[16];
    } group;
    floats x;
    UNROLL for (int i = 0; i < 4; ++i) group.quads[i] = ((const Quad*)sums)[i];
    UNROLL for (int i = 0; i < 16; ++i) x[i] = group.values[i];
    return x;
}

INLINE void write_sums(float* sums, const floats& x) {
    union {
        Quad quads[4];
        float values[16];
    } group;
    UNROLL for (int i = 0; i < 16; ++i) group.values[i] = x[i];
    UNROLL for (int i = 0; i < 4; ++i) ((Quad*)sums)[i] = group.quads[i];
}

INLINE float float_of_entry(Entry x) {
#if defined(ENTRY_FP32)
    return x;
#elif defined(ENTRY_BF16)
    return float_of_bits((int32_t)((uint32_t)x << 16));
#else
    return float_of_half(x);
#endif
}

INLINE Entry entry_of_float(float x) {
#if defined(ENTRY_FP32)
    return x;
#elif defined(ENTRY_BF16)
    int32_t bits = bits_of(x);
    if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FC0;
    return (uint16_t)((uint32_t)(bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
#else
    return x != x ? 0x7E00 : half_of_float(x);
#endif
}

union GroupOfEntries {
    Quad quads[sizeof(Entry)];
    Entry entries[16];
};

// The entries of group g; zeros beyond the last.
INLINE floats read_group(const Extent& extent, int g) {
    floats x;
    if (extent.aligned) {
        GroupOfEntries group;
        const Quad* from = (const Quad*)(extent.entries + 16 * g);
        UNROLL for (int i = 0; i < sizeof(Entry); ++i) group.quads[i] = from[i];
        UNROLL for (int i = 0; i < 16; ++i) x[i] = float_of_entry(group.entries[i]);
    } else {
        UNROLL for (int i = 0; i < 16; ++i) {
            int at = 16 * g + i;
            x[i] = at < extent.count ? float_of_entry(extent.entries[at]) : 0.0f;
        }
    }
    return x;
}

INLINE void write_group(const Extent& extent, int g, const floats& x) {
    if (extent.aligned) {
        GroupOfEntries group;
        Quad* to = (Quad*)(extent.entries + 16 * g);
        UNROLL for (int i = 0; i < 16; ++i) group.entries[i] = entry_of_float(x[i]);
        UNROLL for (int i = 0; i < sizeof(Entry); ++i) to[i] = group.quads[i];
    } else {
        UNROLL for (int i = 0; i < 16; ++i) {
            int at = 16 * g + i;
            if (at < extent.count) extent.entries[at] = entry_of_float(x[i]);
        }
    }
}

#else

INLINE floats read_sums(const float* sums) {
    floats x;
    memcpy(&x, sums, 64);
    return x;
}

INLINE void write_sums(float* sums, const floats& x) { memcpy(sums, &x, 64); }

typedef uint16_t halves __attribute__((vector_size(32)));

#if defined(ENTRY_FP32)
INLINE floats floats_of_entries(const Entry* entries) {
    floats x;
    memcpy(&x, entries, 64);
    return x;
}
INLINE void entries_of_floats(const floats& x, Entry* entries) { memcpy(entries, &x, 64); }
#elif defined(ENTRY_BF16)
INLINE floats floats_of_entries(const Entry* entries) {
    halves x;
    memcpy(&x, entries, 32);
    return float_of_bits(as_ints(__builtin_convertvector(x, words) << 16));
}
INLINE void entries_of_floats(const floats& x, Entry* entries) {
    ints bits = bits_of(x);
    ints rounded = as_ints(as_words(bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    rounded = select((bits & 0x7FFFFFFF) > 0x7F800000, sixteen(0x7FC0), rounded);
    halves r = __builtin_convertvector(as_words(rounded), halves);
    memcpy(entries, &r, 32);
}
#else
INLINE floats floats_of_entries(const Entry* entries) { return floats_of_halves(entries); }
INLINE void entries_of_floats(const floats& x, Entry* entries) {
    halves_of_floats(select(x == x, x, sixteen(float_of_bits(0x7FC00000))), entries);
}
#endif

INLINE floats read_group(const Extent& extent, int g) {
    int count = extent.count - 16 * g;
    if (count >= 16) return floats_of_entries(extent.entries + 16 * g);
    Entry padded[16] = {};
    if (count > 0) memcpy(padded, extent.entries + 16 * g, count * sizeof(Entry));
    return floats_of_entries(padded);
}

INLINE void write_group(const Extent& extent, int g, const floats& x) {
    int count = extent.count - 16 * g;
    if (count >= 16) return entries_of_floats(x, extent.entries + 16 * g);
    Entry padded[16];
    entries_of_floats(x, padded);
    if (count > 0) memcpy(extent.entries + 16 * g, padded, count * sizeof(Entry));
}

#endif
