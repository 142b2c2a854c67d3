// A payload, added to the working buffer.
#include "blocks.cuh"

struct Arguments {
    const uint8_t* payload;
    Segment segment;
    Quantizer quantizer;
};

INLINE void decompress_accumulate_at(const Arguments& a, int64_t index, const Ahead&) {
    Supergroup<floats> x = read(a.segment, index);
    add(x, decode(a.segment, a.quantizer, index, a.payload));
    write(a.segment, index, x);
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(mx_decompress_accumulate, Arguments, decompress_accumulate_at, ahead_of)
