// A further pass of a rotation: 2 to 256 points at a stride. Items are 256 values each: neighbouring
// columns of 2^log_points points.
#include "rotated.cuh"

struct Arguments {
    Rotated from, to;
    Blocks blocks;
    Quantizer quantizer;
    int32_t log_stride, log_points;
};

// Where a column begins.
INLINE int64_t top_of(const Arguments& a, int64_t column) {
    int64_t before = column >> a.log_stride;
    return (before << (a.log_stride + a.log_points)) + (column - (before << a.log_stride));
}

#ifdef __CUDACC__

// Each thread holds 16 of 256 values; value p is in row p mod 2^log_points.
INLINE void mix_columns(const Arguments& a, int64_t item, const Ahead&) {
    int points = 1 << a.log_points;
    int64_t top = top_of(a, item << (8 - a.log_points));
    auto place = [&](int i) {
        int p = 16 * own_lane() + i;
        return top + (p >> a.log_points) + ((int64_t)(p & (points - 1)) << a.log_stride);
    };
    floats x;
    UNROLL for (int i = 0; i < 16; ++i) {
        int64_t at = place(i);
        x[i] = a.from.values ? a.from.values[at]
                             : centred(a.from.integers, integer_at(a.from.integers, at));
    }
    UNROLL for (int distance = 1; distance < 16; distance *= 2) {
        if (distance >= points) break;
        UNROLL for (int i = 0; i < 16; ++i) {
            if (i & distance) continue;
            float p = x[i], q = x[i + distance];
            x[i] = p + q;
            x[i + distance] = p - q;
        }
    }
    UNROLL for (int distance = 1; distance < 16; distance *= 2) {
        if (16 * distance >= points) break;
        bool subtracts = own_lane() & distance;
        UNROLL for (int i = 0; i < 16; ++i) {
            float other = exchange(x[i], distance);
            x[i] = other + (subtracts ? -x[i] : x[i]);
        }
    }
    if (a.to.values) {
        UNROLL for (int i = 0; i < 16; ++i) a.to.values[place(i)] = x[i];
        return;
    }
    words random;
    UNROLL for (int i = 0; i < 16; ++i) {
        int64_t at = place(i);
        BlockKey key = block_key(a.quantizer.key, a.quantizer.first_unit + (at >> 8));
        random[i] = random_words(key, (uint32_t)at & 255);
    }
    float scale = a.blocks.scale[top >> a.blocks.log_block];
    ints codes = quantize(a.quantizer, x, scale, random);
    UNROLL for (int i = 0; i < 16; ++i) write_integer(a.to.integers, place(i), codes[i]);
}

#else

// What is worked on at once: 64 columns are whole cache lines, of one-byte integers, too.
#define COLUMNS 64

// Integers of COLUMNS columns on their way from or to memory.
struct Held {
    alignas(64) uint8_t bytes[256 * COLUMNS * 4];
};

INLINE void butterflies(floats* x, int points) {
    for (int distance = 1; distance < points; distance *= 2)
        for (int begin = 0; begin < points; begin += 2 * distance)
            for (int i = begin; i < begin + distance; ++i) {
                floats p = x[i], q = x[i + distance];
                x[i] = p + q;
                x[i + distance] = p - q;
            }
}

INLINE void copy_integers(const Integers& to, int64_t to_at, const Integers& from, int64_t at) {
    int64_t bytes = from.bytes;
    memcpy((uint8_t*)to.memory + to_at * bytes, (const uint8_t*)from.memory + at * bytes,
           COLUMNS * bytes);
}

// Sixteen columns at a time fill vectors, so that no lane needs another one's value.
INLINE void mix_lines(const Arguments& a, int64_t column) {
    int points = 1 << a.log_points;
    int64_t stride = (int64_t)1 << a.log_stride, top = top_of(a, column);
    Held held;
    Integers in = {held.bytes, a.from.integers.bytes, a.from.integers.offset};
    Integers out = {held.bytes, a.to.integers.bytes, 0};
    if (!a.from.values)
        for (int p = 0; p < points; ++p) copy_integers(in, p * COLUMNS, a.from.integers, top + p * stride);
    float scale = a.to.values ? 0.0f : a.blocks.scale[top >> a.blocks.log_block];
    for (int c = 0; c < COLUMNS; c += 16) {
        floats x[256];
        if (a.from.values)
            for (int p = 0; p < points; ++p) x[p] = read_sums(a.from.values + top + p * stride + c);
        else
            for (int p = 0; p < points; ++p) x[p] = centred(in, integers_at(in, p * COLUMNS + c));
        butterflies(x, points);
        if (a.to.values) {
            for (int p = 0; p < points; ++p) write_sums(a.to.values + top + p * stride + c, x[p]);
            continue;
        }
        for (int p = 0; p < points; ++p) {
            words random = random_of_unit(a.quantizer, top + p * stride + c);
            write_integers(out, p * COLUMNS + c, quantize(a.quantizer, x[p], scale, random));
        }
    }
    if (!a.to.values)
        for (int p = 0; p < points; ++p) copy_integers(a.to.integers, top + p * stride, out, p * COLUMNS);
}

// The first of COLUMNS columns does the work of all, whichever items they are in.
INLINE void mix_columns(const Arguments& a, int64_t item, const Ahead&) {
    int64_t first = item << (8 - a.log_points), last = (item + 1) << (8 - a.log_points);
    first = (first + COLUMNS - 1) & -COLUMNS;
    for (int64_t column = first; column < last; column += COLUMNS) mix_lines(a, column);
}

#endif

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // lines of its own pass

KERNEL(mix, Arguments, mix_columns, ahead_of)
