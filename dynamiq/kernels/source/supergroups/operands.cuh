// What kernels read from and write to besides payloads: the bucket, and sums in the order of tiles.
#pragma once

#include "bucket.cuh"
#include "rotation.cuh"
#include "wire.cuh"

// Partial sums: those in `sums` or, if that is null, this rank's own entries, brought into range.
struct Values {
    Bucket bucket;
    const float* factor;  // of every supergroup of the bucket, a power of two
    const float* shift;   // of every supergroup, subtracted after scaling
    float* sums;          // [tiles, size, 256]
    Rotation rotation;    // of own entries
};

INLINE Supergroup<floats> read(const Values& values, int64_t index, int64_t unit) {
    Supergroup<floats> x;
    if (values.sums) {
        FOR_EACH_GROUP(g) x[g] = read_sums(values.sums + index * 256 + 16 * g);
        return x;
    }
    if (unit < 0) {
        FOR_EACH_GROUP(g) x[g] = sixteen(0.0f);
        return x;
    }
    Extent extent = extent_of(values.bucket, unit);
    float factor = values.factor[unit], shift = values.shift[unit];
    FOR_EACH_GROUP(g) {
        x[g] = read_group(extent, g) * factor - shift;
        if (extent.count < 256) {
            ints beyond = as_ints(entry_lanes(g)) >= extent.count;
            x[g] = select(beyond, sixteen(0.0f), x[g]);
        }
    }
    rotate(x, values.rotation, unit);
    return x;
}

INLINE Ahead ahead_in(const Bucket& bucket, int64_t unit) {
#ifdef __CUDACC__
    return {};
#else
    if (unit < 0) return {};
    return {(const char*)extent_of(bucket, unit).entries, 256 * sizeof(Entry)};
#endif
}

// What `read` will need; sums are read one after the other anyway.
INLINE Ahead ahead_in(const Values& values, const Tiles& tiles, int64_t index) {
    return values.sums ? Ahead{} : ahead_in(values.bucket, tiles.units[index]);
}

// Where the result goes, and what is undone on the way.
struct Result {
    Bucket bucket;
    const float* factor;  // as in Values
    const float* offset;  // of every supergroup, added after the division; NaN: contaminated
    float divisor;
    float limit;  // largest magnitude; infinity if there is none
    Rotation rotation;
};

INLINE void write(const Result& result, int64_t unit, Supergroup<floats> x, const Ahead& ahead) {
    rotate_back(x, result.rotation, unit);
    Extent extent = extent_of(result.bucket, unit);
    float inverse = 1.0f / result.factor[unit], offset = result.offset[unit];
    FOR_EACH_GROUP(g) {
        floats y = x[g];
        if (result.divisor != 1.0f) y = y / result.divisor;
        y = (y + offset) * inverse;
        y = select(y < -result.limit, sixteen(-result.limit), y);
        y = select(y > result.limit, sixteen(result.limit), y);
        y = select(y == y, y, sixteen(float_of_bits(0x7FC00000)));
        write_group(extent, g, y);
        ahead.fetch(g);
    }
}
