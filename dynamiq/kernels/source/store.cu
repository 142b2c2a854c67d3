// Partial sums to the result.
#include "operands.cuh"

struct Arguments {
    Values values;
    const int64_t* units;
    Result result;
};

INLINE void store_at(const Arguments& a, int64_t index) {
    int64_t unit = a.units[index];
    if (unit >= 0) write(a.result, unit, read(a.values, index, unit));
}

INLINE void prefetch(const Arguments& a, int64_t index) {
    fetch(place_in(a.result.bucket, a.units[index]), 256 * sizeof(Entry));
}

KERNEL(store, Arguments, store_at)
