"""How gradients are distributed: what errors are predicted from, and nothing more of them."""

from typing import Annotated, Literal

from pydantic import Field

from dynamiq.core.description import Value
from dynamiq.planner.hardware import NotNegative


class GradientSpectrum(Value):
    """Energies of a gradient's supergroups, and how alike the ranks are.

    Attributes:
        version: Of this format.
        energies: Of every supergroup of 256 entries, or of a sample of them: sum over the ranks of
            the squares of the entries.
        world_size: Ranks whose energies were summed.
        correlation: ρ, mean correlation between two ranks' gradients (algorithm: energies of sums of
            k ranks are F/n · (k + k(k - 1)ρ)).
    """

    version: Literal[1] = 1
    energies: Annotated[tuple[NotNegative, ...], Field(min_length=1)]
    world_size: Annotated[int, Field(ge=1)]
    correlation: Annotated[float, Field(ge=0, le=1)]
