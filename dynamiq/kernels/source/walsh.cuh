// What randomised Hadamard transforms of 256 entries have in common: random signs, sums, differences.
#pragma once

#include "randomness.cuh"

// Change the sign of entry 16 g + l where bit l of the unit's word g is set.
INLINE void change_signs(Supergroup<floats>& x, uint64_t key, int64_t unit) {
    group_words random = random_words(block_key(key, unit), group_numbers());
    words left = 31u - counting();
    FOR_EACH_GROUP(g) {
        words sign = shifted(of_group(random, g), left) & 0x80000000u;
        x[g] = float_of_bits(bits_of(x[g]) ^ as_ints(sign));
    }
}

// Add and subtract at the distances 1, 2, 4, ... 128.
INLINE void hadamard(Supergroup<floats>& x) {
    FOR_EACH_GROUP(g) x[g] = hadamard_of_group(x[g]);
    hadamard_of_groups(x);
}
