// A finished payload to the result.
#include "operands.cuh"
#include "quantizer.cuh"

struct Arguments {
    const uint8_t* payload;
    Result result;
    Tiles tiles;
    Quantizer quantizer;
};

INLINE void decompress_at(const Arguments& a, int64_t index) {
    Place place = place_of(a.tiles, a.quantizer.widths, index);
    if (place.unit >= 0) write(a.result, place.unit, decode(place, a.quantizer, a.payload));
}

INLINE void prefetch(const Arguments& a, int64_t index) {
    fetch(place_in(a.result.bucket, a.tiles.units[index]), 256 * sizeof(Entry));
}

KERNEL(decompress, Arguments, decompress_at)
