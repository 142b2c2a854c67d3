// A payload, and the values that it is added to, to the sum's payload: nothing else is written.
#include "operands.cuh"
#include "quantizer.cuh"

struct Arguments {
    const uint8_t* payload;
    Values values;
    Tiles incoming;
    Tiles outgoing;
    Quantizer quantizer;
    uint8_t* out;
};

INLINE void decompress_accumulate_recompress_at(const Arguments& a, int64_t index, const Ahead& ahead) {
    Place from = place_of(a.incoming, a.quantizer, index);
    Place to = place_of(a.outgoing, a.quantizer, index);
    Supergroup<floats> x;
    if (to.width) {
        x = read(a.values, index, to.unit);
        Supergroup<floats> more = decode(from, a.quantizer, a.incoming.address, a.payload);
        FOR_EACH_GROUP(g) if (from.width) x[g] = x[g] + more[g];
    }
    encode(x, to, a.quantizer, a.outgoing.address, a.out, ahead);
}

INLINE Ahead ahead_of(const Arguments& a, int64_t index) {
    return ahead_in(a.values, a.incoming, index);
}

KERNEL(decompress_accumulate_recompress, Arguments, decompress_accumulate_recompress_at, ahead_of)
