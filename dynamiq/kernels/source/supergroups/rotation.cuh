// The randomised Hadamard transform of supergroups: dynamiq/kernels/supergroups/rotation.py.
#pragma once

#include "walsh.cuh"

struct Rotation {
    uint64_t signs;  // key
    int64_t is_on;
};

INLINE void divide_by_16(Supergroup<floats>& x) {
    FOR_EACH_GROUP(g) x[g] = x[g] * 0.0625f;
}

INLINE void rotate(Supergroup<floats>& x, const Rotation& rotation, int64_t unit) {
    if (!rotation.is_on) return;
    change_signs(x, rotation.signs, unit);
    hadamard(x);
    divide_by_16(x);
}

INLINE void rotate_back(Supergroup<floats>& x, const Rotation& rotation, int64_t unit) {
    if (!rotation.is_on) return;
    hadamard(x);
    divide_by_16(x);
    change_signs(x, rotation.signs, unit);
}
