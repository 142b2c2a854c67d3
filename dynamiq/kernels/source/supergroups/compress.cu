// Partial sums to a payload.
#include "operands.cuh"
#include "quantizer.cuh"

struct Arguments {
    Values values;
    Tiles tiles;
    Quantizer quantizer;
    uint8_t* payload;
};

INLINE void compress_at(const Arguments& a, int64_t index, const Ahead& ahead) {
    Place place = place_of(a.tiles, a.quantizer, index);
    Supergroup<floats> x;
    if (place.width) x = read(a.values, index, place.unit);
    encode(x, place, a.quantizer, a.tiles.address, a.payload, ahead);
}

INLINE Ahead ahead_of(const Arguments& a, int64_t index) {
    return ahead_in(a.values, a.tiles, index);
}

KERNEL(compress, Arguments, compress_at, ahead_of)
