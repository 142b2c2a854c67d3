"""How gradients are distributed: what errors are predicted from, and nothing more of them.

What each part is there for:

* ``energies``: DynamiQ's widths and OmniReduce's blocks follow from how unequal supergroups are,
  and FP16's subnormal numbers from how small they are;
* ``correlation``: how much a partial sum loses, compared with the finished sum, and how much what
  ranks lose alike adds up;
* ``bands``: both are not the same for large and for small supergroups, and DynamiQ's codes lose
  less of entries that are all alike, more of a few large ones (``compressors/dynamiq/errors.py``);
* ``peaks``: what an MX element loses depends on how far it is below the largest of its block;
* ``evenness``: what ranks lose alike adds up only where all of them have the same entries;
* ``unevenness``: THC's range is that of the rank with the largest norm;
* ``dtype``: entries that are BF16 already lose nothing when they are first sent as BF16.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dynamiq.core.description import Value
from dynamiq.planner.profiles.hardware import NotNegative

POINTS = 512
"""Energies that a measured spectrum has at most: DynamiQ's largest tile has as many rows."""
BANDS = 8
"""Bands of the order of energies, those of ``compressors/dynamiq/memory.py``."""
PEAKS = 49
"""The largest entries of blocks, then quarters of an octave below them; the rest is in the last."""

Correlation = Annotated[float, Field(ge=0, le=1)]
Shape = tuple[NotNegative, NotNegative, NotNegative]


class Band(Value):
    """Supergroups of about the same energy.

    Attributes:
        correlation: ρ between two ranks.
        rotated: Shape of rotated supergroups (``compressors/dynamiq/errors.py``), zeros if unknown.
        grouped: Shape of supergroups in which every group of 16 has a scale.
    """

    correlation: Correlation
    rotated: Shape = (0.0, 0.0, 0.0)
    grouped: Shape = (0.0, 0.0, 0.0)


class GradientSpectrum(Value):
    """Energies of a gradient's supergroups, and how alike the ranks are.

    ``dynamiq.planner.spectrum_of`` measures it, and so does ``Pipeline(capture=...)``.
    The first three fields are enough; without the others ranks are as alike in all supergroups,
    and entries Gaussian.

    Attributes:
        version: Of this format.
        energies: Of every supergroup of 256 entries, or of as many for each: sum over the ranks of
            the squares of the entries. In descending order, whatever order they are given in.
        world_size: Ranks whose energies were summed.
        correlation: ρ, the mean correlation of two ranks' gradients: a sum of k of n ranks has the
            energy F/n · (k + k (k - 1) ρ).
        bands: 8, in descending order of energy: 1/64 of the supergroups, up to 1/8, 1/4, 1/2, 3/4,
            7/8, 15/16, and the rest.
        peaks: Shares of the energy by how far entries are below the largest of their block of 32:
            first the largest ones, then each quarter of an octave.
        evenness: How evenly ranks share the energy of a supergroup: the effective number of ranks,
            relative to all of them.
        unevenness: Relative standard deviation of the ranks' own energies.
        dtype: The narrowest in which the entries are exact.
    """

    version: Literal[1] = 1
    energies: Annotated[tuple[NotNegative, ...], Field(min_length=1, max_length=4096)]
    world_size: Annotated[int, Field(ge=1)]
    correlation: Correlation
    bands: tuple[Band, ...] = ()
    peaks: tuple[NotNegative, ...] = ()
    evenness: Annotated[float, Field(gt=0, le=1)] = 1.0
    unevenness: NotNegative = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @field_validator("energies")
    @classmethod
    def _in_order(cls, energies: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(sorted(energies, reverse=True))

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for name, count in (("bands", BANDS), ("peaks", PEAKS)):
            found = len(getattr(self, name))
            if found not in (0, count):
                raise ValueError(f"{name} has {found} values; it takes {count}, or none")
        return self

    @property
    def correlations(self) -> tuple[float, ...]:
        """ρ of the eight bands."""
        if not self.bands:
            return (self.correlation,) * BANDS
        return tuple(band.correlation for band in self.bands)
