// A payload, and the values that it is added to, to sums.
#include "operands.cuh"
#include "quantizer.cuh"

struct Arguments {
    const uint8_t* payload;
    Values values;
    float* sums;  // [tiles, size, 256]; may be the values' own
    Tiles tiles;
    Quantizer quantizer;
};

INLINE void decompress_accumulate_at(const Arguments& a, int64_t index, const Ahead& ahead) {
    Place place = place_of(a.tiles, a.quantizer, index);
    Supergroup<floats> x = read(a.values, index, place.unit);
    Supergroup<floats> more = decode(place, a.quantizer, a.tiles.address, a.payload);
    FOR_EACH_GROUP(g) {
        if (place.width) x[g] = x[g] + more[g];
        write_sums(a.sums + index * 256 + 16 * g, x[g]);
        ahead.fetch(g);
    }
}

INLINE Ahead ahead_of(const Arguments& a, int64_t index) {
    return ahead_in(a.values, a.tiles, index);
}

KERNEL(decompress_accumulate, Arguments, decompress_accumulate_at, ahead_of)
