// Counter-based randomness, bit for bit that of dynamiq/core/randomness.py.
#pragma once

#include "team.cuh"

// The key of one block of 256 entries.
struct BlockKey {
    uint32_t low, high;
};

INLINE uint64_t mix64(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

// Add one more part to a key.
INLINE uint64_t fold(uint64_t key, uint64_t part) {
    return mix64(key + 0x9E3779B97F4A7C15ull + part);
}

INLINE BlockKey block_key(uint64_t key, int64_t block) {
    uint64_t x = mix64(key + (uint64_t)(block + 1) * 0x9E3779B97F4A7C15ull);
    return {(uint32_t)x, (uint32_t)(x >> 32)};
}

// 32 random bits for every lane; W is `words` or `group_words`.
template <class W>
INLINE W random_words(BlockKey key, const W& lanes) {
    W x = lanes * 0x9E3779B1u + key.low;
    x = x ^ (x >> 16);
    x = x * 0x7FEB352Du;
    x = x ^ (x >> 15);
    x = x + key.high;
    x = x * 0x846CA68Bu;
    return x ^ (x >> 16);
}

// The lanes of the entries of group g.
INLINE words entry_lanes(int g) { return counting() + (uint32_t)(16 * g); }

// Numbers in (0, 1): (k + 1/2) / 2^23.
template <class W>
INLINE auto uniform(const W& random) {
    return (to_float(as_ints(random >> 9)) + 0.5f) * 0x1p-23f;
}

// Round to one of the two neighbouring bfloat16 numbers with probability by distance; as bits.
INLINE ints stochastic_bfloat16(const floats& x, const words& random) {
    ints bits = bits_of(x);
    ints magnitude = bits & 0x7FFFFFFF;
    ints rounded = (magnitude + as_ints(random >> 16)) & (int32_t)0xFFFF0000;
    rounded = select(rounded > 0x7F7F0000, sixteen(0x7F7F0000), rounded);
    rounded = select(magnitude >= 0x7F800000, magnitude, rounded);
    rounded = (rounded | (bits & (int32_t)0x80000000)) >> 16 & 0xFFFF;
    return select(magnitude > 0x7F800000, sixteen(0x7FC0), rounded);
}
