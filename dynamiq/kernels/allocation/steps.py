"""What wider codes are worth, and what they cost."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """The steps from width to width of each class of messages.

    Attributes:
        worth: float64[h, s, b], the least weight per unit of price for which a row of each band
            takes a step; greater for later steps. The first step, from nothing to the narrowest
            width, is free.
        bytes: int64[s], what a step costs in each message.
        transfers: int64[h], how often each class's bytes count where classes share them.
        bands: int64[r], the band of each row; None if there is only one.
    """

    worth: Tensor
    bytes: Tensor
    transfers: Tensor
    bands: Tensor | None = None
