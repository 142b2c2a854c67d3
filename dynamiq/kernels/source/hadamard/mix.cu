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

// Sixteen neighbouring columns: whole cache lines, and no lane needs another one's value.
INLINE void mix_sixteen(const Arguments& a, int64_t column) {
    int points = 1 << a.log_points;
    int64_t top = top_of(a, column);
    floats x[256];
    for (int p = 0; p < points; ++p) x[p] = read_rotated(a.from, top + ((int64_t)p << a.log_stride));
    for (int distance = 1; distance < points; distance *= 2)
        for (int begin = 0; begin < points; begin += 2 * distance)
            for (int i = begin; i < begin + distance; ++i) {
                floats p = x[i], q = x[i + distance];
                x[i] = p + q;
                x[i + distance] = p - q;
            }
    for (int p = 0; p < points; ++p)
        write_rotated(a.to, a.quantizer, a.blocks, top + ((int64_t)p << a.log_stride), x[p]);
}

// Of items with fewer than 16 columns, the first of sixteen columns does the work of all.
INLINE void mix_columns(const Arguments& a, int64_t item, const Ahead&) {
    int64_t first = item << (8 - a.log_points), last = (item + 1) << (8 - a.log_points);
    for (int64_t column = (first + 15) & -16; column < last; column += 16) mix_sixteen(a, column);
}

#endif

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // lines of its own pass

KERNEL(mix, Arguments, mix_columns, ahead_of)
