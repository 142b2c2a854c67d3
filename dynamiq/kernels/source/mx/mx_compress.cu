// Partial sums to a payload.
#include "blocks.cuh"

struct Arguments {
    Segment segment;
    Quantizer quantizer;
    uint8_t* payload;
};

INLINE void compress_at(const Arguments& a, int64_t index, const Ahead&) {
    encode(read(a.segment, index), a.segment, a.quantizer, index, a.payload);
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(mx_compress, Arguments, compress_at, ahead_of)
