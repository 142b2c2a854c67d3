"""One finished run as one row.

Units are in the names: ``_s`` seconds; losses are in nats.
"""

from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field

from evaluation.records import Record
from evaluation.rows import RunRow

OptimizerName = Literal["adamw", "sgd"]
SGD_MOMENTUM = 0.9


class Settings(Record):
    """All that decides a run; rows with equal settings are one run.

    Attributes:
        workload: name in ``evaluation.study.workloads``.
        recipe: name in ``evaluation.study.recipes``.
        bits: budget per entry; ``None`` for recipes without one.
        compressor: what the recipe's name stood for; ``None`` is the exact mean.
        topology: kind of the schedule.
        learning_rate: the peak, as the workload defines it.
        seed: decides initial weights, batches, dropout and rounding.
    """

    workload: str
    recipe: str
    bits: float | None
    compressor: dict[str, Any] | None
    topology: str
    optimizer: OptimizerName
    learning_rate: Annotated[float, Field(gt=0)]
    steps: Annotated[int, Field(ge=1)]
    seed: int
    world_size: Annotated[int, Field(ge=2)] = 4

    @property
    def label(self) -> str:
        """What people call the run."""
        bits = "" if self.bits is None else f" {self.bits:g} bits"
        return f"{self.workload} {self.optimizer} {self.recipe}{bits} seed {self.seed}"


class Evaluation(Record):
    """What held-out data say of a model.

    Attributes:
        loss: mean over the held-out data.
        accuracy: share of right answers; ``None`` where there are none.
    """

    loss: float
    accuracy: float | None = None


class Checkpoint(Record):
    """The model after ``step`` steps."""

    step: int
    held_out: Evaluation


class ErrorSample(Record):
    """How far one step's mean gradient was from the exact one.

    Attributes:
        step: counted from 0.
        vnmse: squared error over the squared norm.
        weighted: the same with every entry's squares divided by v, the mean square of the entry
            over the ranks at this step; entries with v = 0 are left out.
        adam: the same with v Adam's own second moment after the step; ``None`` for others.
    """

    step: int
    vnmse: float
    weighted: float
    adam: float | None


class Row(RunRow):
    """One finished run.

    Attributes:
        checkpoints: ascending; the last one is the end.
        training_loss: mean over all ranks and the last tenth of the steps.
        errors: of some steps.
        bits_per_entry: mean over the steps of bits sent per entry and pass, all included.
        training_s: of the steps, without preparation and checkpoints.
        versions: of the packages in use.
        commit: of the code; see ``evaluation.rows.commit``.
    """

    settings: Settings
    checkpoints: tuple[Checkpoint, ...]
    training_loss: float
    errors: tuple[ErrorSample, ...]
    bits_per_entry: float
    training_s: float
    versions: dict[str, str | None]
    commit: str

    @property
    def final(self) -> Evaluation:
        """The last checkpoint's."""
        return self.checkpoints[-1].held_out

    @property
    def vnmse(self) -> float:
        """Mean over the sampled steps."""
        return fmean(sample.vnmse for sample in self.errors)

    @property
    def weighted(self) -> float:
        """Mean over the sampled steps."""
        return fmean(sample.weighted for sample in self.errors)

    @property
    def adam(self) -> float | None:
        """Mean over the sampled steps; ``None`` for other optimisers."""
        values = [sample.adam for sample in self.errors if sample.adam is not None]
        return fmean(values) if values else None
