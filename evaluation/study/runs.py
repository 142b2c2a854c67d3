"""Which runs there are, and doing those that are not done yet."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamiq import topology_registry
from evaluation import rows
from evaluation.report import environment
from evaluation.study import recipes
from evaluation.study.records import OptimizerName, Row, Settings
from evaluation.study.trainer import Reduction, Training
from evaluation.study.workloads import LEARNING_RATES, WORKLOADS


@dataclass(frozen=True)
class Grid:
    """Every recipe at every number of bits with every seed; those without a budget once a seed.

    Attributes:
        learning_rate: that of the workload and optimiser if not given.
    """

    workload: str
    recipes: Sequence[str]
    bits: Sequence[float]
    seeds: Sequence[int]
    optimizer: OptimizerName
    steps: int
    topology: str = "ring"
    learning_rate: float | None = None

    def settings(self) -> Iterator[Settings]:
        """Yield all runs; seed by seed, so that an early look compares all recipes."""
        rate = self.learning_rate or LEARNING_RATES.get((self.workload, self.optimizer))
        if rate is None:
            raise ValueError(
                f"{self.workload} has no learning rate of its own with {self.optimizer}; give one"
            )
        for seed in self.seeds:
            for recipe, bits in self._recipes():
                compressor = recipes.compressor(recipe, bits)
                yield Settings(
                    workload=self.workload,
                    recipe=recipe,
                    bits=bits,
                    compressor=None if compressor is None else compressor.to_dict(),
                    topology=self.topology,
                    optimizer=self.optimizer,
                    learning_rate=rate,
                    steps=self.steps,
                    seed=seed,
                )

    def _recipes(self) -> Iterator[tuple[str, float | None]]:
        yield from ((recipe, None) for recipe in self.recipes if not recipes.has_budget(recipe))
        budgeted = [recipe for recipe in self.recipes if recipes.has_budget(recipe)]
        yield from ((recipe, bits) for bits in self.bits for recipe in budgeted)


def run_missing(grid: Grid, path: Path) -> Iterator[Row]:
    """Do the runs that a file of rows lacks, adding each to it; yields them."""
    return rows.run_missing(grid.settings(), path, Row, run)


def run(settings: Settings) -> Row:
    """Train once. Deterministic given the settings, package versions and number of threads."""
    workload = WORKLOADS[settings.workload](settings)
    topology = topology_registry.read({"kind": settings.topology})
    compressor = recipes.compressor(settings.recipe, settings.bits)
    reduction = Reduction(compressor, topology, settings.seed)
    return Training(settings, workload, reduction).run(environment()["packages"], rows.commit())
