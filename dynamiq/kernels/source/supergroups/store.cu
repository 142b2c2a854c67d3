// Partial sums to the result.
#include "operands.cuh"

struct Arguments {
    Values values;
    const int64_t* units;
    Result result;
};

INLINE void store_at(const Arguments& a, int64_t index, const Ahead& ahead) {
    int64_t unit = a.units[index];
    if (unit >= 0) write(a.result, unit, read(a.values, index, unit), ahead);
}

INLINE Ahead ahead_of(const Arguments& a, int64_t index) {
    return ahead_in(a.result.bucket, a.units[index]);
}

KERNEL(store, Arguments, store_at, ahead_of)
