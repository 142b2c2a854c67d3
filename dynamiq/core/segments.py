"""Segments: parts of a call's chunks, of which one is on the wire while another is encoded."""

import math
from itertools import pairwise

from dynamiq.core.topology import Schedule

_ENTRIES = 1 << 19
_MOST = 8


def segment_count(schedule: Schedule, numel: int, *, on_cpu: bool) -> int:
    """Return into how many segments a call is split if nobody says, 1 to 8.

    A function of its arguments alone, so the same on all ranks. The first segment is encoded, and
    the last one decoded, while the link idles: a time that falls with the number of segments k like
    entries / k. Each segment's messages cost a constant time of their own. So the best k goes with
    the root of the entries. On a CPU one segment is best for half a million entries, four or five
    for sixteen million (docs/design/segments.md). On a GPU encoding takes less than the messages
    of one segment. On two levels it is the entries of a column that count: those are what is
    encoded, and what crosses the network.

    Args:
        schedule: Of the call.
        numel: Entries of the tensor.
        on_cpu: Whether they are there.
    """
    if not on_cpu:
        return 1
    entries = schedule.compressed_numel(numel)
    return min(max(round(math.sqrt(entries / _ENTRIES)), 1), _MOST)


def segments(positions: int, count: int) -> tuple[range, ...]:
    """Split range(positions) into at most ``count`` contiguous, non-empty ranges."""
    if not positions:
        return ()
    count = max(1, min(count, positions))
    cuts = [positions * i // count for i in range(count + 1)]
    return tuple(range(lo, hi) for lo, hi in pairwise(cuts))
