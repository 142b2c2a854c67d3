"""What wider codes are worth, and what they cost."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Steps:
    """The steps from width to width of each class of messages.

    Attributes:
        worth: float64[h, s, r], the least weight per unit of price for which each row takes a step;
            greater for later steps. The first step, from nothing to the narrowest width, is free.
        bytes: int64[s], what a step costs in each message.
        transfers: int64[h], how often each class's bytes count where classes share them.
    """

    worth: Tensor
    bytes: Tensor
    transfers: Tensor
