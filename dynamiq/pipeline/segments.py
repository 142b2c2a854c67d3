"""Into how many segments a call is split if nobody says."""

import math

from torch import Tensor

_ENTRIES = 1 << 19
_MOST = 8


def segments_of(tensor: Tensor) -> int:
    """Return 1 to 8, from the number of entries and the device alone: the same on all ranks.

    The first segment is encoded, and the last one decoded, while the link idles: a time that falls
    with the number of segments k like entries / k. Each segment's messages cost a constant time of
    their own. So the best k goes with the root of the entries. On a CPU one segment is best for
    half a million entries, four or five for sixteen million (docs/design/segments.md). On a GPU
    encoding takes less than the messages of one segment.
    """
    if not tensor.is_cpu:
        return 1
    return min(max(round(math.sqrt(tensor.numel() / _ENTRIES)), 1), _MOST)
