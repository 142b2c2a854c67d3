// A flat tensor in supergroups: where each lies.
#pragma once

#include "entries.cuh"

// The padded bucket has chunks of `positions` supergroups each. Chunk c holds the entries
// slices[c] to slices[c + 1] of the flat tensor.
struct Bucket {
    Entry* entries;
    const int64_t* slices;
    int64_t positions;
    int64_t origin;  // which entry of the flat tensor entries[0] is
};

INLINE Extent extent_of(const Bucket& bucket, int64_t unit) {
    int64_t chunk = quotient(unit, bucket.positions);
    int64_t begin = bucket.slices[chunk] + (unit - chunk * bucket.positions) * 256;
    int64_t count = bucket.slices[chunk + 1] - begin;
    Extent extent;
    extent.entries = bucket.entries + (begin - bucket.origin);
    extent.count = count < 0 ? 0 : count > 256 ? 256 : (int)count;
    extent.aligned = extent.count == 256 && ((uint64_t)extent.entries & 15) == 0;
    return extent;
}
