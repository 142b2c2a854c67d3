// A team works on one supergroup: 16 threads of a GPU with a group each, or one host thread with all
// 16 groups in turn. Code below this file is written once for both.
//
// `Supergroup<T>` holds a T for each of this thread's groups, to be used inside FOR_EACH_GROUP.
// `group_floats`, `group_ints` and `group_words` hold one number for each group of the supergroup: a
// vector on the host, the thread's own number on a GPU.
#pragma once

#include "portable.cuh"

#ifdef __CUDACC__

#define TEAMS_PER_BLOCK 8
#define FOR_EACH_GROUP(g) for (int g = threadIdx.x & 15, once = 1; once; once = 0)
// Three blocks at a time leave 170 registers for a thread: no architecture needs more (ptxas aims at
// fewer by itself, and spills on some).
#define KERNEL(name, Arguments, work, ahead_of)                                                   \
    extern "C" __global__ void __launch_bounds__(16 * TEAMS_PER_BLOCK, 3)                          \
        name(const __grid_constant__ Arguments arguments, int64_t first, int64_t last) {          \
        int64_t i = first + ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 16;                \
        if (i < last) work(arguments, i, Ahead{});                                                \
    }
// Memory that a team shares.
#define SHARED(Type, name)                                                                        \
    __shared__ Type name##_of_all[TEAMS_PER_BLOCK];                                               \
    Type& name = name##_of_all[threadIdx.x / 16]

struct Ahead {  // a GPU has other teams to work on while one waits
    INLINE void fetch(int) const {}
};

typedef float group_floats;
typedef int32_t group_ints;
typedef uint32_t group_words;

template <class T>
struct Supergroup {
    T own;
    INLINE_MEMBER T& operator[](int) { return own; }
    INLINE_MEMBER const T& operator[](int) const { return own; }
};

INLINE uint32_t team_mask() { return 0xFFFFu << (threadIdx.x & 16); }
INLINE void synchronize() { __syncwarp(team_mask()); }
INLINE int own_lane() { return threadIdx.x & 15; }
INLINE group_words group_numbers() { return own_lane(); }

template <class T>
INLINE T of_group(T x, int) { return x; }

template <class T>
INLINE T select(bool condition, T a, T b) { return condition ? a : b; }

template <class T>
INLINE T exchange(T x, int distance) { return __shfl_xor_sync(team_mask(), x, distance, 16); }

// The largest of a group.
INLINE int32_t largest(const ints& x) {
    int32_t r = x[0];
    UNROLL for (int i = 1; i < 16; ++i) r = x[i] > r ? x[i] : r;
    return r;
}

// The largest of each group.
INLINE group_ints largest_of_each(const Supergroup<ints>& x) { return largest(x.own); }

// The largest of each pair of groups, 0 and 1, 2 and 3, ...; both know it.
INLINE group_ints largest_of_pairs(const Supergroup<ints>& x) {
    int32_t own = largest(x.own), other = exchange(own, 1);
    return other > own ? other : own;
}

// The largest of all groups.
INLINE int32_t largest_of_groups(group_ints x) {
    UNROLL for (int distance = 8; distance; distance /= 2) {
        int32_t other = exchange(x, distance);
        x = other > x ? other : x;
    }
    return x;
}

INLINE int32_t largest_of_all(const Supergroup<ints>& x) {
    return largest_of_groups(largest(x.own));
}

// Threads at a distance of `half` exchange halves of what they hold, and add.
template <int half>
INLINE void add_halves(float* v) {
    bool upper = own_lane() & half;
    UNROLL for (int i = 0; i < half; ++i) {
        float kept = upper ? v[i + half] : v[i];
        float given = upper ? v[i] : v[i + half];
        v[i] = kept + exchange(given, half);
    }
}

// The sum over a binary tree: entry i and i + 128 first, then i + 64, ... Halving leaves each thread
// with the sum of one column of the 16 groups.
INLINE float tree_sum(const Supergroup<floats>& x) {
    float v[16];
    UNROLL for (int i = 0; i < 16; ++i) v[i] = x.own[i];
    add_halves<8>(v);
    add_halves<4>(v);
    add_halves<2>(v);
    add_halves<1>(v);
    UNROLL for (int distance = 8; distance; distance /= 2) v[0] = v[0] + exchange(v[0], distance);
    return v[0];
}

// Sums and differences at the distances of 1, 2, 4 and 8 groups.
INLINE void hadamard_of_groups(Supergroup<floats>& x) {
    UNROLL for (int distance = 1; distance < 16; distance *= 2) {
        bool subtracts = own_lane() & distance;
        UNROLL for (int i = 0; i < 16; ++i) {
            float other = exchange(x.own[i], distance);
            x.own[i] = other + (subtracts ? -x.own[i] : x.own[i]);
        }
    }
}

// One byte of each group, from and to 16 bytes.
INLINE group_ints bytes_at(const uint8_t* from) { return from[own_lane()]; }
INLINE void write_bytes(uint8_t* to, group_ints x) { to[own_lane()] = (uint8_t)x; }

// One byte of each of the first `count` pairs of groups, from and to `count` bytes.
INLINE group_ints bytes_of_pairs_at(const uint8_t* from, int count) {
    int pair = own_lane() / 2;
    return pair < count ? from[pair] : 0;
}
INLINE void write_bytes_of_pairs(uint8_t* to, group_ints x, int count) {
    int pair = own_lane() / 2;
    if (own_lane() % 2 == 0 && pair < count) to[pair] = (uint8_t)x;
}

// Whether this thread speaks for its team.
INLINE bool is_speaker() { return own_lane() == 0; }

// Work of `count` parts that a team shares.
#define FOR_EACH_PART(i, count) for (int64_t i = own_lane(); i < (count); i += 16)

// The sum of what the threads of a team found in their parts.
INLINE int64_t sum_of_parts(int64_t x) {
    UNROLL for (int distance = 8; distance; distance /= 2) x += exchange(x, distance);
    return x;
}

#else

#define FOR_EACH_GROUP(g) for (int g = 0; g < 16; ++g)
#define FOR_EACH_PART(i, count) for (int64_t i = 0; i < (count); ++i)
#define KERNEL(name, Arguments, work, ahead_of)                                                   \
    extern "C" void name(const Arguments* arguments, int64_t first, int64_t last) {               \
        StrictArithmetic strict;                                                                  \
        for (int64_t i = first; i < last; ++i)                                                    \
            work(*arguments, i, i + 3 < last ? ahead_of(*arguments, i + 3) : Ahead{});            \
    }

// A supergroup that is worked on soon. They lie in no order that a CPU could guess; fetched line by
// line between the groups of this one, they cost little waiting. They are used once, so that the
// outer caches need not keep them.
struct Ahead {
    const char* memory;
    int64_t bytes;
    INLINE_MEMBER void fetch(int g) const {
        if (memory) __builtin_prefetch(memory + g * (bytes / 16), 0, 0);
    }
};
#define SHARED(Type, name) Type name

typedef floats group_floats;
typedef ints group_ints;
typedef words group_words;

template <class T>
struct Supergroup {
    T groups[16];
    INLINE_MEMBER T& operator[](int g) { return groups[g]; }
    INLINE_MEMBER const T& operator[](int g) const { return groups[g]; }
};

INLINE void synchronize() {}
INLINE int64_t sum_of_parts(int64_t x) { return x; }
INLINE group_words group_numbers() { return counting(); }

template <class T>
INLINE auto of_group(const T& x, int g) { return x[g]; }

INLINE int32_t largest(ints x) {
#ifdef __AVX512F__
    return _mm512_reduce_max_epi32((__m512i)x);
#else
    int32_t r = x[0];
    for (int i = 1; i < 16; ++i) r = x[i] > r ? x[i] : r;
    return r;
#endif
}

// The larger of two lanes at a distance d: of `a` where bit d of the lane is clear, else of `b`.
#define LANE(i, d) ((i) & d ? (i) + 16 : (i))
#define OTHER(i, d) ((i) & d ? ((i) ^ d) + 16 : (i) ^ d)
#define ALL_LANES(lane, d)                                                                        \
    lane(0, d), lane(1, d), lane(2, d), lane(3, d), lane(4, d), lane(5, d), lane(6, d),           \
        lane(7, d), lane(8, d), lane(9, d), lane(10, d), lane(11, d), lane(12, d), lane(13, d),   \
        lane(14, d), lane(15, d)
template <int d>
INLINE ints merged(ints a, ints b) {
    ints x = shuffled<ints, ALL_LANES(LANE, d)>(a, b);
    ints y = shuffled<ints, ALL_LANES(OTHER, d)>(a, b);
    return x > y ? x : y;
}
#undef LANE
#undef OTHER
#undef ALL_LANES

INLINE group_ints largest_of_each(const Supergroup<ints>& x) {
    ints m[8];
    for (int g = 0; g < 8; ++g) m[g] = merged<8>(x[g], x[g + 8]);
    for (int g = 0; g < 4; ++g) m[g] = merged<4>(m[g], m[g + 4]);
    for (int g = 0; g < 2; ++g) m[g] = merged<2>(m[g], m[g + 2]);
    return merged<1>(m[0], m[1]);
}

INLINE group_ints largest_of_pairs(const Supergroup<ints>& x) {
    ints m[8];
    for (int b = 0; b < 8; ++b) m[b] = x[2 * b] > x[2 * b + 1] ? x[2 * b] : x[2 * b + 1];
    for (int b = 0; b < 4; ++b) m[b] = merged<8>(m[b], m[b + 4]);
    for (int b = 0; b < 2; ++b) m[b] = merged<4>(m[b], m[b + 2]);
    ints pairs = merged<2>(m[0], m[1]);
    return merged<1>(pairs, pairs);
}

INLINE int32_t largest_of_groups(group_ints x) { return largest(x); }

INLINE int32_t largest_of_all(const Supergroup<ints>& x) {
    ints m = x[0];
    for (int g = 1; g < 16; ++g) m = m > x[g] ? m : x[g];
    return largest(m);
}

INLINE float tree_sum(const Supergroup<floats>& x) {
    floats sums[8];
    for (int g = 0; g < 8; ++g) sums[g] = x[g] + x[g + 8];
    for (int half = 4; half; half /= 2)
        for (int g = 0; g < half; ++g) sums[g] = sums[g] + sums[g + half];
    float v[16];
    memcpy(v, &sums[0], 64);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) v[i] = v[i] + v[i + half];
    return v[0];
}

INLINE void hadamard_of_groups(Supergroup<floats>& x) {
    for (int distance = 1; distance < 16; distance *= 2) {
        for (int g = 0; g < 16; ++g) {
            if (g & distance) continue;
            floats a = x[g], b = x[g + distance];
            x[g] = a + b;
            x[g + distance] = a - b;
        }
    }
}

typedef uint8_t bytes __attribute__((vector_size(16)));

INLINE group_ints bytes_at(const uint8_t* from) {
    bytes x;
    memcpy(&x, from, 16);
    return __builtin_convertvector(x, ints);
}

INLINE void write_bytes(uint8_t* to, group_ints x) {
    bytes r = __builtin_convertvector(x, bytes);
    memcpy(to, &r, 16);
}

typedef uint8_t eight_bytes __attribute__((vector_size(8)));

INLINE group_ints bytes_of_pairs_at(const uint8_t* from, int count) {
    eight_bytes x = {};
    if (count == 8) memcpy(&x, from, 8);
    else for (int i = 0; i < count; ++i) x[i] = from[i];
    bytes twice = shuffled<bytes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7>(x, x);
    return __builtin_convertvector(twice, ints);
}

INLINE void write_bytes_of_pairs(uint8_t* to, group_ints x, int count) {
    bytes all = __builtin_convertvector(x, bytes);
    eight_bytes r = shuffled<eight_bytes, 0, 2, 4, 6, 8, 10, 12, 14>(all, all);
    if (count == 8) memcpy(to, &r, 8);
    else for (int i = 0; i < count; ++i) to[i] = r[i];
}

INLINE bool is_speaker() { return true; }

#endif
