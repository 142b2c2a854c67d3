// A finished payload to the working buffer.
#include "blocks.cuh"

struct Arguments {
    const uint8_t* payload;
    Segment segment;
    Quantizer quantizer;
};

INLINE void decompress_at(const Arguments& a, int64_t index, const Ahead&) {
    write(a.segment, index, decode(a.segment, a.quantizer, index, a.payload));
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(mx_decompress, Arguments, decompress_at, ahead_of)
