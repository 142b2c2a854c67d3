// Conversions that some GPUs have an instruction for, behind macros that say so. By PTX ISA, "Data
// Movement and Conversion Instructions: cvt", they round to nearest even and saturate at the largest
// finite number, and back they are exact: what element.cuh computes.
//
// Two that are not used: cvt.rs (stochastic), since it gives four entries 32 random bits together,
// where the codes of every build follow from 20 bits or more for each entry; and the one to UE8M0,
// since a block's exponent takes one addition and one shift, but its instruction a quotient.
#pragma once

#include "team.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define CONVERTS_FP8
#endif
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define CONVERTS_FP6_AND_FP4
#endif

#ifdef CONVERTS_FP8

enum { E4M3 = 0, E5M2 = 1, E3M2 = 2, E2M3 = 3, E2M1 = 4 };

INLINE bool converts(int element) {
#ifdef CONVERTS_FP6_AND_FP4
    return true;
#else
    return element <= E5M2;
#endif
}

// Two codes, that of `low` in the lower byte; and the two halves that codes stand for.
#define CONVERSIONS(name, format)                                                                 \
    INLINE uint16_t codes_##name(float high, float low) {                                         \
        uint16_t r;                                                                               \
        asm("cvt.rn.satfinite." format "x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));     \
        return r;                                                                                 \
    }                                                                                             \
    INLINE uint32_t halves_##name(uint16_t codes) {                                               \
        uint32_t r;                                                                               \
        asm("cvt.rn.f16x2." format "x2 %0, %1;" : "=r"(r) : "h"(codes));                          \
        return r;                                                                                 \
    }
CONVERSIONS(e4m3, "e4m3")
CONVERSIONS(e5m2, "e5m2")
#ifdef CONVERTS_FP6_AND_FP4
CONVERSIONS(e3m2, "e3m2")
CONVERSIONS(e2m3, "e2m3")
// Two codes of 4 bits share a byte.
INLINE uint16_t codes_e2m1(float high, float low) {
    uint16_t r;
    asm("{ .reg .b8 pair, none; mov.b16 {pair, none}, 0;\n"
        "cvt.rn.satfinite.e2m1x2.f32 pair, %1, %2;\n"
        "mov.b16 %0, {pair, none}; }" : "=h"(r) : "f"(high), "f"(low));
    return (r & 15) | (r & 0xF0) << 4;
}
INLINE uint32_t halves_e2m1(uint16_t codes) {
    uint32_t r;
    uint16_t both = (codes & 15) | codes >> 4;
    asm("{ .reg .b8 pair, none; mov.b16 {pair, none}, %1;\n"
        "cvt.rn.f16x2.e2m1x2 %0, pair; }" : "=r"(r) : "h"(both));
    return r;
}
#endif
#undef CONVERSIONS

#define ALL_CODES(name)                                                                           \
    UNROLL for (int i = 0; i < 16; i += 2) {                                                      \
        uint16_t pair = codes_##name(y[i + 1], y[i]);                                             \
        r[i] = pair & 0xFF;                                                                       \
        r[i + 1] = pair >> 8;                                                                     \
    }                                                                                             \
    break;
#define ALL_VALUES(name)                                                                          \
    UNROLL for (int i = 0; i < 16; i += 2) {                                                      \
        uint32_t pair = halves_##name((uint16_t)(codes[i] | codes[i + 1] << 8));                  \
        r[i] = float_of_half((uint16_t)pair);                                                     \
        r[i + 1] = float_of_half((uint16_t)(pair >> 16));                                         \
    }                                                                                             \
    break;

INLINE ints converted_codes(const floats& y, int element) {
    ints r;
    switch (element) {
        case E5M2: ALL_CODES(e5m2)
#ifdef CONVERTS_FP6_AND_FP4
        case E3M2: ALL_CODES(e3m2)
        case E2M3: ALL_CODES(e2m3)
        case E2M1: ALL_CODES(e2m1)
#endif
        default: ALL_CODES(e4m3)
    }
    return r;
}

INLINE floats converted_values(const ints& codes, int element) {
    floats r;
    switch (element) {
        case E5M2: ALL_VALUES(e5m2)
#ifdef CONVERTS_FP6_AND_FP4
        case E3M2: ALL_VALUES(e3m2)
        case E2M3: ALL_VALUES(e2m3)
        case E2M1: ALL_VALUES(e2m1)
#endif
        default: ALL_VALUES(e4m3)
    }
    return r;
}
#undef ALL_CODES
#undef ALL_VALUES

#endif
