"""Into how many segments a call is split if nobody says."""

from torch import Tensor

from dynamiq.core.layout import segment_count


def segments_of(tensor: Tensor) -> int:
    """Return 1 to 8, from the number of entries and the device alone: the same on all ranks."""
    return segment_count(tensor.numel(), on_cpu=tensor.is_cpu)
