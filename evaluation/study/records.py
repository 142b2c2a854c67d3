"""One finished run as one JSON row, in a file that several processes may add to.

Units are in the names: ``_s`` seconds; losses are in nats.
"""

import fcntl
import os
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field

from evaluation.records import Record

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
    def key(self) -> str:
        """Names the run."""
        return self.model_dump_json()

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


class Row(Record):
    """One finished run.

    Attributes:
        checkpoints: ascending; the last one is the end.
        training_loss: mean over all ranks and the last tenth of the steps.
        errors: of some steps.
        bits_per_entry: mean over the steps of bits sent per entry and pass, all included.
        training_s: of the steps, without preparation and checkpoints.
        versions: of the packages in use.
        commit: of the code, with "-dirty" if files differed from it; empty outside a checkout.
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


def read_rows(path: Path) -> list[Row]:
    """Return the finished rows of a file, none if there is no such file.

    A last line without an end is what a crash left of a row, and no row.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_text("utf-8").split("\n")
    return [Row.model_validate_json(line) for line in lines]


def append_row(path: Path, row: Row) -> None:
    """Add a row to a file, completely or not at all; several processes may do so at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read()
        # Cuts off what a crash left of a row, which would swallow this one.
        file.seek(content.rfind(b"\n") + 1)
        file.truncate()
        file.write(f"{row.model_dump_json()}\n".encode())
        file.flush()
        os.fsync(file.fileno())
