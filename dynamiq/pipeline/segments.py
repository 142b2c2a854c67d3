"""Into how many segments a call is split if nobody says."""

import math

import torch

from dynamiq.core.topology import Schedule

_ENTRIES = 1 << 19
_MOST = 8


def segments_of(schedule: Schedule, numel: int, device: torch.device) -> int:
    """Return 1 to 8, from the number of entries and the device alone: the same on all ranks.

    The first segment is encoded, and the last one decoded, while the link idles: a time that falls
    with the number of segments k like entries / k. Each segment's messages cost a constant time of
    their own. So the best k goes with the root of the entries. On a CPU one segment is best for
    half a million entries, four or five for sixteen million (docs/design/segments.md). On a GPU
    encoding takes less than the messages of one segment. On two levels it is the entries of a
    column that count: those are what is encoded, and what crosses the network.
    """
    if device.type != "cpu":
        return 1
    entries = schedule.compressed_numel(numel)
    return min(max(round(math.sqrt(entries / _ENTRIES)), 1), _MOST)
