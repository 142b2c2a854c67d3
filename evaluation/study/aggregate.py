"""Rows to means: each run is compared with the uncompressed run of the same seed.

The pair shares initial weights, batches and dropout, so most of the scatter from seed to seed
cancels in the difference.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, stdev

from evaluation.study.recipes import UNCOMPRESSED
from evaluation.study.records import OptimizerName, Row


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds and its standard error; ``None`` with one seed, which shows no scatter."""

    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Return mean and standard error of at least one value."""
        several = len(values) > 1
        return cls(fmean(values), stdev(values) / math.sqrt(len(values)) if several else None)


@dataclass(frozen=True)
class Line:
    """All seeds of one recipe at one number of bits, each beside its uncompressed run."""

    rows: tuple[Row, ...]
    references: tuple[Row, ...]

    @property
    def recipe(self) -> str:
        return self.rows[0].settings.recipe

    @property
    def bits(self) -> float | None:
        return self.rows[0].settings.bits

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(row.settings.seed for row in self.rows)

    @property
    def loss_increase(self) -> Estimate:
        """Of the held-out loss at the end."""
        return Estimate.of([r.final.loss - u.final.loss for r, u in self._pairs])

    @property
    def training_loss_increase(self) -> Estimate:
        """Of the mean training loss over the last tenth of the steps."""
        return Estimate.of([r.training_loss - u.training_loss for r, u in self._pairs])

    @property
    def accuracy_increase(self) -> Estimate | None:
        """Of the held-out accuracy at the end, as a share; ``None`` where there is none."""
        pairs = [(r.final.accuracy, u.final.accuracy) for r, u in self._pairs]
        values = [ours - exact for ours, exact in pairs if ours is not None and exact is not None]
        return Estimate.of(values) if values else None

    @property
    def vnmse(self) -> float:
        return fmean(row.vnmse for row in self.rows)

    @property
    def weighted(self) -> float:
        return fmean(row.weighted for row in self.rows)

    @property
    def adam(self) -> float | None:
        values = [row.adam for row in self.rows if row.adam is not None]
        return fmean(values) if values else None

    @property
    def bits_per_entry(self) -> float:
        return fmean(row.bits_per_entry for row in self.rows)

    @property
    def _pairs(self) -> list[tuple[Row, Row]]:
        return list(zip(self.rows, self.references, strict=True))


@dataclass(frozen=True)
class Section:
    """The runs that can be compared: one workload, optimiser, rate, length and topology."""

    workload: str
    optimizer: OptimizerName
    learning_rate: float
    steps: int
    topology: str
    world_size: int
    rows: tuple[Row, ...]

    @cached_property
    def references(self) -> dict[int, Row]:
        """The uncompressed runs by seed."""
        return {r.settings.seed: r for r in self.rows if r.settings.recipe == UNCOMPRESSED}

    @cached_property
    def lines(self) -> list[Line]:
        """Recipes in the order of their first rows, each by falling bits."""
        found: dict[tuple[str, float | None], list[Row]] = defaultdict(list)
        for row in self.rows:
            if row.settings.recipe != UNCOMPRESSED and row.settings.seed in self.references:
                found[row.settings.recipe, row.settings.bits].append(row)
        recipes = list(dict.fromkeys(recipe for recipe, _ in found))
        ordered = sorted(found, key=lambda k: (recipes.index(k[0]), -(k[1] or 0)))
        return [self._line(found[key]) for key in ordered]

    @property
    def unpaired(self) -> list[str]:
        """The runs that no uncompressed run stands beside."""
        alone = [row.settings for row in self.rows if row.settings.seed not in self.references]
        return [settings.label for settings in alone]

    def _line(self, rows: list[Row]) -> Line:
        rows.sort(key=lambda row: row.settings.seed)
        return Line(tuple(rows), tuple(self.references[row.settings.seed] for row in rows))


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return what can be compared, in the order of the first rows.

    Raises:
        ValueError: a recipe's name stands for two compressors, or a run is there twice.
    """
    found: dict[tuple[str, OptimizerName, float, int, str, int], list[Row]] = defaultdict(list)
    for row in rows:
        s = row.settings
        place = (s.workload, s.optimizer, s.learning_rate, s.steps, s.topology, s.world_size)
        if s.label in {other.settings.label for other in found[place]}:
            raise ValueError(
                f"two rows are the same run, or a recipe has changed in between: {s.label}; "
                f"leave the rows that count"
            )
        found[place].append(row)
    return [Section(*place, tuple(group)) for place, group in found.items()]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Return Spearman's, or ``None`` for fewer than three points or equal values only."""
    if len(x) < 3 or len(set(x)) == 1 or len(set(y)) == 1:
        return None
    a, b = _ranks(x), _ranks(y)
    mean = (len(x) + 1) / 2
    covariance = sum((p - mean) * (q - mean) for p, q in zip(a, b, strict=True))
    spread = sum((p - mean) ** 2 for p in a) * sum((q - mean) ** 2 for q in b)
    return covariance / math.sqrt(spread)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; equal values share the mean of theirs."""
    return [
        sum(other < value for other in values) + (1 + sum(o == value for o in values)) / 2
        for value in values
    ]
