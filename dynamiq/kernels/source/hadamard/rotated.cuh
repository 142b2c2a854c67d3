// Rotated entries between passes over memory: float32, or integers once they are rounded.
#pragma once

#include "entries.cuh"
#include "integers.cuh"
#include "walsh.cuh"

// One of the two; the other is null.
struct Rotated {
    float* values;
    Integers integers;
};

// What belongs to each block of 2^log_block entries.
struct Blocks {
    const float* factor;  // a power of two, for entries
    const float* scale;   // for rotated entries
    uint64_t signs;       // key
    int64_t first_unit;   // in the padded bucket
    int64_t log_block;
};

INLINE floats read_rotated(const Rotated& r, int64_t at) {
    if (r.values) return read_sums(r.values + at);
    return centred(r.integers, integers_at(r.integers, at));
}

INLINE void write_rotated(const Rotated& r, const Quantizer& q, const Blocks& blocks, int64_t at,
                          const floats& x) {
    if (r.values) return write_sums(r.values + at, x);
    float scale = blocks.scale[at >> blocks.log_block];
    write_integers(r.integers, at, quantize(q, x, scale, random_of_unit(q, at)));
}

INLINE Extent unit_of(Entry* entries, int64_t numel, int64_t unit) {
    int64_t count = numel - unit * 256;
    Extent extent;
    extent.entries = entries + unit * 256;
    extent.count = count < 0 ? 0 : count > 256 ? 256 : (int)count;
    extent.aligned = extent.count == 256 && ((uint64_t)extent.entries & 15) == 0;
    return extent;
}
