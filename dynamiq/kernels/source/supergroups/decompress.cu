// A finished payload to the result.
#include "operands.cuh"
#include "quantizer.cuh"

struct Arguments {
    const uint8_t* payload;
    Result result;
    Tiles tiles;
    Quantizer quantizer;
};

INLINE void decompress_at(const Arguments& a, int64_t index, const Ahead& ahead) {
    Place place = place_of(a.tiles, a.quantizer, index);
    if (place.unit < 0) return;
    Supergroup<floats> x = decode(place, a.quantizer, a.tiles.address, a.payload);
    write(a.result, place.unit, x, ahead);
}

INLINE Ahead ahead_of(const Arguments& a, int64_t index) {
    return ahead_in(a.result.bucket, a.tiles.units[index]);
}

KERNEL(decompress, Arguments, decompress_at, ahead_of)
