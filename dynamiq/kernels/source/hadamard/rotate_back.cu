// The last pass of a rotation back: 256 points that lie together, signs, and the result.
#include "rotated.cuh"

struct Arguments {
    Rotated from;
    Blocks blocks;
    Entry* entries;
    int64_t numel;
    float divisor;
    float limit;  // largest magnitude; infinity if there is none
};

INLINE void rotate_unit_back(const Arguments& a, int64_t unit, const Ahead&) {
    int64_t block = unit << 8 >> a.blocks.log_block;
    float scale = a.blocks.scale[block], factor = a.blocks.factor[block];
    Supergroup<floats> x;
    FOR_EACH_GROUP(g) x[g] = read_rotated(a.from, unit * 256 + 16 * g);
    hadamard(x);
    FOR_EACH_GROUP(g) x[g] = x[g] * scale;
    change_signs(x, a.blocks.signs, a.blocks.first_unit + unit);
    Extent extent = unit_of(a.entries, a.numel, unit);
    FOR_EACH_GROUP(g) {
        floats y = x[g];
        if (a.divisor != 1.0f) y = y / a.divisor;
        y = y * factor;
        y = select(y < -a.limit, sixteen(-a.limit), y);
        y = select(y > a.limit, sixteen(a.limit), y);
        y = select(y == y, y, sixteen(float_of_bits(0x7FC00000)));
        write_group(extent, g, y);
    }
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(rotate_back, Arguments, rotate_unit_back, ahead_of)
