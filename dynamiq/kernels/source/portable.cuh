// The only file that looks at the compiler: sixteen values at once, for NVRTC and for C++.
//
// A group has 16 entries. `floats`, `ints` and `words` hold one value for each: a thread's registers
// on a GPU, one vector on the host (an AVX-512 register where there is one). Comparisons give -1 or
// 0, `select` chooses by that. Nothing here rounds differently on the two: fused multiply-adds are
// off, division is exact, conversions round to nearest even.
#pragma once

#ifdef __CUDACC__

#ifdef __CUDACC_RTC__  // which has no headers
typedef signed int int32_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef signed long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

#define INLINE __device__ __forceinline__
#define INLINE_MEMBER INLINE
#define UNROLL _Pragma("unroll")

template <class T>
struct Sixteen {
    T v[16];
    INLINE T& operator[](int i) { return v[i]; }
    INLINE T operator[](int i) const { return v[i]; }
};

typedef Sixteen<float> floats;
typedef Sixteen<int32_t> ints;
typedef Sixteen<uint32_t> words;

#define OPERATOR(op)                                                                              \
    template <class T>                                                                            \
    INLINE Sixteen<T> operator op(const Sixteen<T>& a, const Sixteen<T>& b) {                     \
        Sixteen<T> r;                                                                             \
        UNROLL for (int i = 0; i < 16; ++i) r[i] = a[i] op b[i];                                  \
        return r;                                                                                 \
    }                                                                                             \
    template <class T>                                                                            \
    INLINE Sixteen<T> operator op(const Sixteen<T>& a, T b) {                                     \
        Sixteen<T> r;                                                                             \
        UNROLL for (int i = 0; i < 16; ++i) r[i] = a[i] op b;                                     \
        return r;                                                                                 \
    }                                                                                             \
    template <class T>                                                                            \
    INLINE Sixteen<T> operator op(T a, const Sixteen<T>& b) {                                     \
        Sixteen<T> r;                                                                             \
        UNROLL for (int i = 0; i < 16; ++i) r[i] = a op b[i];                                     \
        return r;                                                                                 \
    }
#define SHIFT(op)                                                                                 \
    template <class T>                                                                            \
    INLINE Sixteen<T> operator op(const Sixteen<T>& a, int b) {                                   \
        Sixteen<T> r;                                                                             \
        UNROLL for (int i = 0; i < 16; ++i) r[i] = a[i] op b;                                     \
        return r;                                                                                 \
    }
#define COMPARISON(op)                                                                            \
    template <class T>                                                                            \
    INLINE ints operator op(const Sixteen<T>& a, const Sixteen<T>& b) {                           \
        ints r;                                                                                   \
        UNROLL for (int i = 0; i < 16; ++i) r[i] = a[i] op b[i] ? -1 : 0;                         \
        return r;                                                                                 \
    }                                                                                             \
    template <class T>                                                                            \
    INLINE ints operator op(const Sixteen<T>& a, T b) {                                           \
        ints r;                                                                                   \
        UNROLL for (int i = 0; i < 16; ++i) r[i] = a[i] op b ? -1 : 0;                            \
        return r;                                                                                 \
    }
OPERATOR(+) OPERATOR(-) OPERATOR(*) OPERATOR(/) OPERATOR(&) OPERATOR(|) OPERATOR(^)
SHIFT(<<) SHIFT(>>)
COMPARISON(<) COMPARISON(>) COMPARISON(>=) COMPARISON(<=) COMPARISON(==)
#undef OPERATOR
#undef SHIFT
#undef COMPARISON

template <class T>
INLINE Sixteen<T> select(const ints& mask, const Sixteen<T>& a, const Sixteen<T>& b) {
    Sixteen<T> r;
    UNROLL for (int i = 0; i < 16; ++i) r[i] = mask[i] ? a[i] : b[i];
    return r;
}

#define CONVERSION(name, To, From, expression)                                                    \
    INLINE To name(From x) { return expression; }                                                 \
    INLINE Sixteen<To> name(const Sixteen<From>& x) {                                             \
        Sixteen<To> r;                                                                            \
        UNROLL for (int i = 0; i < 16; ++i) r[i] = name(x[i]);                                    \
        return r;                                                                                 \
    }
CONVERSION(bits_of, int32_t, float, __float_as_int(x))
CONVERSION(float_of_bits, float, int32_t, __int_as_float(x))
CONVERSION(to_float, float, int32_t, (float)x)
CONVERSION(to_int, int32_t, float, (int32_t)x)
CONVERSION(as_ints, int32_t, uint32_t, (int32_t)x)
CONVERSION(as_words, uint32_t, int32_t, (uint32_t)x)
#undef CONVERSION

template <class T>
INLINE Sixteen<T> sixteen(T x) {
    Sixteen<T> r;
    UNROLL for (int i = 0; i < 16; ++i) r[i] = x;
    return r;
}

INLINE words counting() {
    words r;
    UNROLL for (int i = 0; i < 16; ++i) r[i] = i;
    return r;
}

template <class T>
INLINE Sixteen<T> lookup(const T* table, int, const ints& index) {
    Sixteen<T> r;
    UNROLL for (int i = 0; i < 16; ++i) r[i] = table[index[i]];
    return r;
}

// One word shifted left by 16 distances.
INLINE words shifted(uint32_t x, const words& distances) {
    words r;
    UNROLL for (int i = 0; i < 16; ++i) r[i] = x << distances[i];
    return r;
}

// Sums and differences at the distances 1, 2, 4 and 8.
INLINE floats hadamard_of_group(floats x) {
    UNROLL for (int distance = 1; distance < 16; distance *= 2) {
        UNROLL for (int i = 0; i < 16; ++i) {
            if (i & distance) continue;
            float a = x[i], b = x[i + distance];
            x[i] = a + b;
            x[i + distance] = a - b;
        }
    }
    return x;
}

INLINE float float_of_half(uint16_t x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

INLINE uint16_t half_of_float(float x) {
    uint16_t r;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}

struct alignas(16) Quad {
    uint32_t v[4];
};

// Four integers of 4 · bits bits each: codes 4k to 4k + 3, the first one lowest.
INLINE void join_fours(const ints& codes, int bits, uint64_t* fours) {
    UNROLL for (int k = 0; k < 4; ++k)
        fours[k] = (uint64_t)codes[4 * k] | (uint64_t)codes[4 * k + 1] << bits |
                   (uint64_t)codes[4 * k + 2] << 2 * bits | (uint64_t)codes[4 * k + 3] << 3 * bits;
}

#else  // a C++ compiler

#include <cstdint>
#include <cstring>
#ifdef __SSE__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define UNROLL

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));

INLINE floats select(ints mask, floats a, floats b) { return mask ? a : b; }
INLINE ints select(ints mask, ints a, ints b) { return mask ? a : b; }

INLINE ints bits_of(floats x) { return (ints)x; }
INLINE floats float_of_bits(ints x) { return (floats)x; }
INLINE floats to_float(ints x) { return __builtin_convertvector(x, floats); }
INLINE ints to_int(floats x) { return __builtin_convertvector(x, ints); }
INLINE ints as_ints(words x) { return (ints)x; }
INLINE words as_words(ints x) { return (words)x; }

INLINE float float_of_bits(int32_t x) {
    float r;
    memcpy(&r, &x, 4);
    return r;
}

INLINE int32_t bits_of(float x) {
    int32_t r;
    memcpy(&r, &x, 4);
    return r;
}

INLINE floats sixteen(float x) { return x - floats{}; }
INLINE ints sixteen(int32_t x) { return x - ints{}; }
INLINE words sixteen(uint32_t x) { return x - words{}; }

INLINE words counting() { return words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// Tables are padded to 16 values; those of up to 32 values are looked up in registers.
INLINE floats lookup(const float* table, int size, ints index) {
#ifdef __AVX512F__
    if (size <= 16) return (floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
    if (size <= 32)
        return (floats)_mm512_permutex2var_ps(_mm512_loadu_ps(table), (__m512i)index,
                                              _mm512_loadu_ps(table + 16));
    return (floats)_mm512_i32gather_ps((__m512i)index, table, 4);
#else
    (void)size;
    floats r;
    for (int i = 0; i < 16; ++i) r[i] = table[index[i]];
    return r;
#endif
}

INLINE ints lookup(const int32_t* table, int size, ints index) {
    return bits_of(lookup((const float*)table, size, index));
}

// While it lives, this thread rounds to nearest and keeps denormals, whatever it was told before
// (torch.set_flush_denormal, other libraries): all threads and ranks have the same arithmetic.
struct StrictArithmetic {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    StrictArithmetic() { _mm_setcsr(0x1F80); }
    ~StrictArithmetic() { _mm_setcsr(before); }
#elif defined(__aarch64__)
    uint64_t before;
    StrictArithmetic() {
        asm volatile("mrs %0, fpcr" : "=r"(before));
        asm volatile("msr fpcr, %0" ::"r"((uint64_t)0));
    }
    ~StrictArithmetic() { asm volatile("msr fpcr, %0" ::"r"(before)); }
#endif
};

// The lanes of two vectors, those of b counted on from those of a.
template <class R, int... lanes, class V>
INLINE R shuffled(V a, V b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, lanes...);
#else
    const int from[] = {lanes...}, count = sizeof(V) / sizeof(a[0]);
    R r;
    for (unsigned i = 0; i < sizeof...(lanes); ++i)
        r[i] = from[i] < count ? a[from[i]] : b[from[i] - count];
    return r;
#endif
}

INLINE words shifted(uint32_t x, words distances) { return sixteen(x) << distances; }

// Sums and differences at the distances 1, 2, 4 and 8: with signs, each is one sum of two lanes.
#define OF_OTHERS(d)                                                                              \
    0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d, 8 ^ d, 9 ^ d, 10 ^ d, 11 ^ d, 12 ^ d, \
        13 ^ d, 14 ^ d, 15 ^ d
template <int d>
INLINE floats sums_and_differences(floats x) {
    floats other = shuffled<floats, OF_OTHERS(d)>(x, x);
    ints subtracts = (as_ints(counting()) & d) != 0;
    return other + float_of_bits(bits_of(x) ^ (subtracts & (int32_t)0x80000000));
}
#undef OF_OTHERS

INLINE floats hadamard_of_group(floats x) {
    x = sums_and_differences<1>(x);
    x = sums_and_differences<2>(x);
    x = sums_and_differences<4>(x);
    return sums_and_differences<8>(x);
}

typedef uint64_t longs __attribute__((vector_size(64)));
typedef uint64_t four_longs __attribute__((vector_size(32)));

// Four integers of 4 · bits bits each: codes 4k to 4k + 3, the first one lowest; up to 16 bits.
INLINE void join_fours(ints codes, int bits, uint64_t* fours) {
    longs twos = (longs)codes;
    twos = (twos | twos >> (32 - bits)) & (((uint64_t)1 << 2 * bits) - 1);
    four_longs even = shuffled<four_longs, 0, 2, 4, 6>(twos, twos);
    four_longs odd = shuffled<four_longs, 1, 3, 5, 7>(twos, twos);
    four_longs joined = even | odd << 2 * bits;
    memcpy(fours, &joined, 32);
}

// Undo that for two integers of 8 · bits bits; up to 8 bits.
INLINE ints split_eights(uint64_t low, uint64_t high, int bits) {
    longs shifts = longs{0, 1, 2, 3, 4, 5, 6, 7} * (uint64_t)bits;
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    longs first = (low - longs{}) >> shifts & mask, second = (high - longs{}) >> shifts & mask;
    return shuffled<ints, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30>(
        (ints)first, (ints)second);
}

// IEEE half precision, 16 numbers at a time; nearest even, as every machine's own instruction does.
INLINE floats floats_of_halves(const uint16_t* halves) {
#ifdef __AVX512F__
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)halves));
#else
    floats r;
    for (int i = 0; i < 16; ++i) {
        int32_t magnitude = halves[i] & 0x7FFF;
        // Exact: the exponent is moved by 112, and a half's denormals are normal numbers of float.
        float x = float_of_bits(magnitude << 13) * 0x1p112f;
        if (magnitude >= 0x7C00) x = float_of_bits(0x7F800000 | magnitude << 13);
        r[i] = float_of_bits(bits_of(x) | (int32_t)((uint32_t)(halves[i] & 0x8000) << 16));
    }
    return r;
#endif
}

INLINE void halves_of_floats(const floats& x, uint16_t* halves) {
#ifdef __AVX512F__
    _mm256_storeu_si256((__m256i*)halves, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 16; ++i) {
        int32_t bits = bits_of(x[i]), magnitude = bits & 0x7FFFFFFF, half;
        if (magnitude > 0x7F800000) {
            half = 0x7E00;
        } else if (magnitude >= 0x47800000) {  // 2^16 and more
            half = 0x7C00;
        } else if (magnitude >= 0x38800000) {  // 2^-14 and more: normal; may round up to infinity
            half = (magnitude + 0xFFF + (magnitude >> 13 & 1) - 0x38000000) >> 13;
        } else {  // adding 1/2 leaves the denormal's bits, rounded, at the end of the mantissa
            half = bits_of(float_of_bits(magnitude) + 0.5f) - 0x3F000000;
        }
        halves[i] = (uint16_t)(half | ((uint32_t)bits >> 16 & 0x8000));
    }
#endif
}

#endif

// a / b for numbers below 2^32; a GPU has no 64-bit division.
INLINE int64_t quotient(int64_t a, int64_t b) { return (uint32_t)a / (uint32_t)b; }
