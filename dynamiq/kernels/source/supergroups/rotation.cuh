// The randomised Hadamard transform of supergroups, bit for bit that of dynamiq/kernels/supergroups/rotation.py.
#pragma once

#include "randomness.cuh"

struct Rotation {
    uint64_t signs;  // key
    int64_t is_on;
};

// Change the sign of entry 16 g + l where bit l of the block's word g is set.
INLINE void change_signs(Supergroup<floats>& x, const Rotation& rotation, int64_t unit) {
    group_words random = random_words(block_key(rotation.signs, unit), group_numbers());
    words left = 31u - counting();
    FOR_EACH_GROUP(g) {
        words sign = shifted(of_group(random, g), left) & 0x80000000u;
        x[g] = float_of_bits(bits_of(x[g]) ^ as_ints(sign));
    }
}

// Add and subtract entries at the distances 1, 2, 4, ... 128; then divide by 16.
INLINE void hadamard(Supergroup<floats>& x) {
    FOR_EACH_GROUP(g) x[g] = hadamard_of_group(x[g]);
    hadamard_of_groups(x);
    FOR_EACH_GROUP(g) x[g] = x[g] * 0.0625f;
}

INLINE void rotate(Supergroup<floats>& x, const Rotation& rotation, int64_t unit) {
    if (!rotation.is_on) return;
    change_signs(x, rotation, unit);
    hadamard(x);
}

INLINE void rotate_back(Supergroup<floats>& x, const Rotation& rotation, int64_t unit) {
    if (!rotation.is_on) return;
    hadamard(x);
    change_signs(x, rotation, unit);
}
