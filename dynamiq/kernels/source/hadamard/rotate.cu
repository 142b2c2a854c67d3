// The first pass of a rotation: entries, signs, and 256 points that lie together.
#include "rotated.cuh"

struct Arguments {
    Entry* entries;
    int64_t numel;
    Blocks blocks;
    Rotated to;
    Quantizer quantizer;
};

INLINE void rotate_unit(const Arguments& a, int64_t unit, const Ahead&) {
    Extent extent = unit_of(a.entries, a.numel, unit);
    float factor = a.blocks.factor[unit << 8 >> a.blocks.log_block];
    Supergroup<floats> x;
    FOR_EACH_GROUP(g) x[g] = read_group(extent, g) * factor;
    change_signs(x, a.blocks.signs, a.blocks.first_unit + unit);
    hadamard(x);
    FOR_EACH_GROUP(g) write_rotated(a.to, a.quantizer, a.blocks, unit * 256 + 16 * g, x[g]);
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(rotate, Arguments, rotate_unit, ahead_of)
