// How 16 codes of 8, 6 or 4 bits become 16, 12 or 8 bytes, the first code lowest.
#pragma once

#include "team.cuh"

#ifdef __CUDACC__

INLINE void write_16_bytes(uint8_t* to, uint64_t low, uint64_t high) {
    Quad quad = {{(uint32_t)low, (uint32_t)(low >> 32), (uint32_t)high, (uint32_t)(high >> 32)}};
    *(Quad*)to = quad;
}
INLINE void write_12_bytes(uint8_t* to, uint64_t low, uint32_t high) {
    uint32_t* words = (uint32_t*)to;
    words[0] = (uint32_t)low;
    words[1] = (uint32_t)(low >> 32);
    words[2] = high;
}
INLINE void write_8_bytes(uint8_t* to, uint64_t all) { *(uint64_t*)to = all; }

INLINE void read_16_bytes(const uint8_t* from, uint64_t& low, uint64_t& high) {
    Quad quad = *(const Quad*)from;
    low = quad.v[0] | (uint64_t)quad.v[1] << 32;
    high = quad.v[2] | (uint64_t)quad.v[3] << 32;
}
INLINE void read_12_bytes(const uint8_t* from, uint64_t& low, uint32_t& high) {
    const uint32_t* words = (const uint32_t*)from;
    low = words[0] | (uint64_t)words[1] << 32;
    high = words[2];
}
INLINE uint64_t read_8_bytes(const uint8_t* from) { return *(const uint64_t*)from; }

// Two integers of 8 · bits bits each to 16 codes.
INLINE ints split_eights(uint64_t low, uint64_t high, int bits) {
    ints codes;
    UNROLL for (int i = 0; i < 8; ++i) {
        codes[i] = (int32_t)(low >> i * bits) & ((1 << bits) - 1);
        codes[i + 8] = (int32_t)(high >> i * bits) & ((1 << bits) - 1);
    }
    return codes;
}

#else

INLINE void write_12_bytes(uint8_t* to, uint64_t low, uint32_t high) {
    memcpy(to, &low, 8);
    memcpy(to + 8, &high, 4);
}
INLINE void write_8_bytes(uint8_t* to, uint64_t all) { memcpy(to, &all, 8); }

INLINE void read_12_bytes(const uint8_t* from, uint64_t& low, uint32_t& high) {
    memcpy(&low, from, 8);
    memcpy(&high, from + 8, 4);
}
INLINE uint64_t read_8_bytes(const uint8_t* from) {
    uint64_t all;
    memcpy(&all, from, 8);
    return all;
}

#endif

INLINE void pack_8_bits(const ints& codes, uint8_t* to) {
#ifdef __CUDACC__
    uint64_t fours[4];
    join_fours(codes, 8, fours);
    write_16_bytes(to, fours[0] | fours[1] << 32, fours[2] | fours[3] << 32);
#else
    bytes all = __builtin_convertvector(codes, bytes);
    memcpy(to, &all, 16);
#endif
}

INLINE ints unpack_8_bits(const uint8_t* from) {
#ifdef __CUDACC__
    uint64_t low, high;
    read_16_bytes(from, low, high);
    return split_eights(low, high, 8);
#else
    bytes all;
    memcpy(&all, from, 16);
    return __builtin_convertvector(all, ints);
#endif
}

INLINE void pack(const ints& codes, int bits, uint8_t* to) {
    if (bits == 8) return pack_8_bits(codes, to);
    uint64_t fours[4];
    if (bits == 6) {
        join_fours(codes, 6, fours);
        const uint64_t high = fours[2] | fours[3] << 24;
        write_12_bytes(to, fours[0] | fours[1] << 24 | high << 48, (uint32_t)(high >> 16));
    } else {
        join_fours(codes, 4, fours);
        write_8_bytes(to, fours[0] | fours[1] << 16 | fours[2] << 32 | fours[3] << 48);
    }
}

INLINE ints unpack(const uint8_t* from, int bits) {
    if (bits == 8) return unpack_8_bits(from);
    if (bits == 6) {
        uint64_t low;
        uint32_t high;
        read_12_bytes(from, low, high);
        return split_eights(low, low >> 48 | (uint64_t)high << 16, 6);
    }
    uint64_t all = read_8_bytes(from);
    return split_eights(all, all >> 32, 4);
}
