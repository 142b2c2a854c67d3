// The energy and the mean of every supergroup of the padded bucket (DynamiQ §3.1).
#include "operands.cuh"

struct Arguments {
    Bucket bucket;
    float* energy;  // [n * p]
    float* mean;    // [n * p]
    float limit;    // largest magnitude of both, 2^126 / n
};

INLINE float clamped(double x, double low, double high) {
    return (float)(x < low ? low : x > high ? high : x);
}

INLINE void statistics_of(const Arguments& a, int64_t unit, const Ahead&) {
    Extent extent = extent_of(a.bucket, unit);
    Supergroup<floats> x, squares;
    Supergroup<ints> magnitudes;
    FOR_EACH_GROUP(g) {
        x[g] = read_group(extent, g);
        magnitudes[g] = bits_of(x[g]) & 0x7FFFFFFF;
    }
    float magnitude = float_of_bits(largest_of_groups(largest_of_each(magnitudes)));
    float factor = magnitude >= 0x1p50f ? 0x1p-100f : magnitude < 0x1p-50f ? 0x1p100f : 1.0f;
    FOR_EACH_GROUP(g) {
        x[g] = x[g] * factor;
        squares[g] = x[g] * x[g];
    }
    double undo = 1.0f / factor;
    double energy = (double)tree_sum(squares) * undo * undo;
    float sum = tree_sum(x);
    double mean = (double)(sum / (float)(extent.count ? extent.count : 1)) * undo;
    if (!is_speaker()) return;
    bool finite = energy - energy == 0.0;
    if (finite && energy > 0.0) energy = clamped(energy, 0x1p-126, a.limit);
    a.energy[unit] = energy != energy ? float_of_bits(0x7FC00000) : (float)energy;
    a.mean[unit] = mean != mean ? float_of_bits(0x7FC00000) : clamped(mean, -a.limit, a.limit);
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(statistics, Arguments, statistics_of, ahead_of)
