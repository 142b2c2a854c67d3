// Where a byte of a payload is, as dynamiq/kernels/supergroups/wire.py says, and how codes become bits.
#pragma once

#include "randomness.cuh"

// One width that a format uses, and where its tables begin (quantizer.cuh).
struct Width {
    int32_t chosen;  // read it by bits()
    int32_t steps;   // levels that may lie inside a cell of the search table
    int32_t levels, gaps, next, starts, values;

    // A build for reports may know only one width, so that its instructions are that width's.
#ifdef ONLY_WIDTH
    INLINE_MEMBER int bits() const { return ONLY_WIDTH; }
#else
    INLINE_MEMBER int bits() const { return chosen; }
#endif
    // The index R of the largest level.
    INLINE_MEMBER int top() const { return (1 << (bits() - 1)) - 1; }
    // Cells of the search table.
    INLINE_MEMBER int cells() const { return 2 << bits(); }
};

struct Widths {
    const Width* rows;  // ascending
    int64_t count;
};

// What a message's random numbers are a function of, besides the entry.
struct Address {
    uint64_t entries;       // key of this sender's words for entries
    uint64_t group_scales;  // key of its words for group scales
    uint64_t strata;        // key that all senders share, before the pair of ranks is folded in
    int32_t sender, world_size;
};

// The tiles of one message. Rows of `units` have `size` places, -1 where there is no supergroup.
struct Tiles {
    const int64_t* units;
    const int64_t* cuts;     // per tile and width: how many supergroups have at least that many bits
    const int64_t* offsets;  // bytes; the payload begins at offsets[0]
    int64_t size;
    Address address;
};

// One supergroup of a payload.
struct Place {
    int64_t unit;
    const Width* width;  // null if it takes no bits
    int64_t codes, group_scales, scale;
    int64_t slack, slack_end;  // its share of the bytes that the tile leaves unused
};

INLINE int64_t code_bytes(int bits) { return 32 * bits; }

INLINE Place place_of(const Tiles& tiles, const Widths& widths, int group_scale_bytes,
                      int64_t index) {
    int64_t tile = quotient(index, tiles.size), position = index - tile * tiles.size;
    const int64_t* cuts = tiles.cuts + tile * widths.count;
    int64_t begin = tiles.offsets[tile] - tiles.offsets[0];
    int64_t end = tiles.offsets[tile + 1] - tiles.offsets[0];
    Place place;
    place.unit = tiles.units[index];
    place.width = nullptr;
    place.codes = 0;
    int64_t bytes = 0, wider = 0, unscaled = 0;
    for (int64_t i = widths.count - 1; i >= 0; --i) {
        const Width& width = widths.rows[i];
        int64_t bits = width.chosen;
        if (position >= wider && position < cuts[i]) {
            place.width = &width;
            place.codes = begin + bytes + (position - wider) * code_bytes(bits);
        }
        bytes += (cuts[i] - wider) * code_bytes(bits);
        wider = cuts[i];
        if (bits == 16) unscaled = cuts[i];
    }
    int64_t scaled = wider - unscaled, before = position - unscaled;
    place.group_scales = begin + bytes + before * group_scale_bytes;
    place.scale = begin + bytes + scaled * group_scale_bytes + before * 2;
    int64_t used = begin + bytes + scaled * (group_scale_bytes + 2), spare = end - used;
    int64_t share = quotient(spare + tiles.size - 1, tiles.size);
    int64_t slack = share * position, slack_end = slack + share;
    place.slack = used + (slack < spare ? slack : spare);
    place.slack_end = used + (slack_end < spare ? slack_end : spare);
    return place;
}

// Begin to fetch what the next supergroups will write, or a full store buffer waits for it.
INLINE void expect_writes(uint8_t* payload, const Place& place, int bits) {
#ifndef __CUDACC__
    uint8_t* codes = payload + place.codes + 4 * code_bytes(bits);
    for (int64_t i = 0; i < code_bytes(bits); i += 64) __builtin_prefetch(codes + i, 1);
    __builtin_prefetch(payload + place.group_scales + 4 * 16, 1);
#endif
}

// The codes of one supergroup on their way to or from a payload.
struct alignas(16) Codes {
    uint16_t words[256];
};

// Write 16 codes as 16 · bits bits, the first one lowest.
INLINE void pack(const ints& codes, int bits, uint16_t* out) {
    uint64_t fours[4];
    join_fours(codes, bits, fours);
#ifndef __CUDACC__
    if (bits <= 8) {  // two integers of `bits` bytes; what the stores add is overwritten later
        uint64_t low = fours[0] | fours[1] << 4 * bits, high = fours[2] | fours[3] << 4 * bits;
        memcpy(out, &low, 8);
        memcpy((uint8_t*)out + bits, &high, 8);
        return;
    }
#endif
    uint64_t pending = 0;
    int held = 0;
    UNROLL for (int k = 0; k < 4; ++k) {
        pending |= fours[k] << held;
        for (held += 4 * bits; held >= 16; held -= 16) {
            *out++ = (uint16_t)pending;
            pending >>= 16;
        }
    }
}

// Undo `pack`, for up to 10 bits.
INLINE ints unpack(const uint16_t* in, int bits) {
#ifndef __CUDACC__
    if (bits <= 8) {
        uint64_t low, high;
        memcpy(&low, in, 8);
        memcpy(&high, (const uint8_t*)in + bits, 8);
        return split_eights(low, high, bits);
    }
#endif
    ints codes;
    uint64_t pending = 0;
    int held = 0, mask = (1 << bits) - 1;
    UNROLL for (int i = 0; i < 16; i += 4) {
        for (; held < 4 * bits; held += 16) pending |= (uint64_t)*in++ << held;
        UNROLL for (int k = 0; k < 4; ++k) codes[i + k] = (int32_t)(pending >> k * bits) & mask;
        pending >>= 4 * bits;
        held -= 4 * bits;
    }
    return codes;
}

// A 16-bit number at an even address.
INLINE void copy_word(uint8_t* to, uint16_t value) { *(uint16_t*)to = value; }
INLINE uint16_t word_at(const uint8_t* from) { return *(const uint16_t*)from; }

// Copy an even number of bytes together, 16 at a time where both ends allow it.
INLINE void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
#ifdef __CUDACC__
    if ((((uint64_t)to | (uint64_t)from | bytes) & 15) == 0) {
        FOR_EACH_PART(i, bytes / 16) ((Quad*)to)[i] = ((const Quad*)from)[i];
    } else {
        FOR_EACH_PART(i, bytes) to[i] = from[i];
    }
#else
    memcpy(to, from, bytes);
#endif
}
