// Integers from a payload, added to those that are there, and to a payload or to memory.
#include "integers.cuh"

struct Arguments {
    const uint8_t* payload;  // null: none comes in
    Integers integers;
    uint8_t* out;  // null: none goes out
    int32_t bits, out_bits;
    int32_t adds;    // whether what is there counts
    int32_t writes;  // whether the sum is kept
};

INLINE void carry_unit(const Arguments& a, int64_t unit, const Ahead&) {
#ifdef __CUDACC__
    const uint8_t* in = a.payload + unit * 32 * a.bits;
    uint8_t* out = a.out + unit * 32 * a.out_bits;
#else
    Packed read, written;
    uint8_t *in = read.bytes, *out = written.bytes;
    if (a.payload) memcpy(in, a.payload + unit * 32 * a.bits, 32 * a.bits);
#endif
    FOR_EACH_GROUP(g) {
        int64_t at = unit * 256 + 16 * g;
        ints sum = sixteen((int32_t)0);
        if (a.payload) sum = unpack((const uint16_t*)(in + 2 * a.bits * g), a.bits);
        if (a.adds) sum = sum + integers_at(a.integers, at);
        if (a.writes) write_integers(a.integers, at, sum);
        if (a.out) pack(sum, a.out_bits, (uint16_t*)(out + 2 * a.out_bits * g));
    }
#ifndef __CUDACC__
    if (a.out) memcpy(a.out + unit * 32 * a.out_bits, out, 32 * a.out_bits);
#endif
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(carry, Arguments, carry_unit, ahead_of)
