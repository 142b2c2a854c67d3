// A payload, and the values that it is added to, to the sum's payload: nothing else is written.
#include "blocks.cuh"

struct Arguments {
    const uint8_t* payload;
    Segment incoming;
    Segment outgoing;
    Quantizer quantizer;
    uint8_t* out;
};

INLINE void decompress_accumulate_recompress_at(const Arguments& a, int64_t index, const Ahead&) {
    Supergroup<floats> x = read(a.incoming, index);
    add(x, decode(a.incoming, a.quantizer, index, a.payload));
    encode(x, a.outgoing, a.quantizer, index, a.out);
}

INLINE Ahead ahead_of(const Arguments&, int64_t) { return {}; }  // one after the other

KERNEL(mx_decompress_accumulate_recompress, Arguments, decompress_accumulate_recompress_at, ahead_of)
