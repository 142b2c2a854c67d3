"""What crosses a process or a file: the plan of a run, its rows, and the results of a comparison.

Units are in the names: ``_s`` seconds, ``_bytes`` bytes, ``_mbit`` 10⁶ bits per second.
"""

from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, TypeAdapter

import dynamiq  # noqa: F401  registers the compressors and topologies that a plan may name
from dynamiq.core.registry import AnyCompressor, AnyTopology


class Record(BaseModel):
    """A frozen value that is written as JSON and read back as it was."""

    # A run that diverged is a result, too.
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, ser_json_inf_nan="constants"
    )


class DistributedPlan(Record):
    """What a run of several ranks does.

    Attributes:
        world_size: number of ranks.
    """

    world_size: Annotated[int, Field(ge=2)] = 4


class Plan(DistributedPlan):
    """One training run: what it trains with, how long, and how gradients are reduced.

    Attributes:
        label: how tables and figures call it.
        sequences: sequences per rank and step.
        learning_rate: the peak for AdamW, of all weights but the embeddings.
        validation_sequences: held-out sequences for the loss at the end, over all ranks.
    """

    label: str
    compressor: AnyCompressor
    topology: AnyTopology
    steps: Annotated[int, Field(ge=1)]
    seed: int = 0
    sequences: Annotated[int, Field(ge=1)] = 8
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    validation_sequences: Annotated[int, Field(ge=1)] = 128


class Seat(Record):
    """Where one worker sits.

    Attributes:
        address: IPv4 address of rank 0, where the ranks meet.
        launcher_pid: the process whose death ends the worker.
        timeout_s: how long a silent peer is waited for.
    """

    rank: int
    address: str
    port: int
    launcher_pid: int
    timeout_s: float


P = TypeVar("P", bound=DistributedPlan)


class WorkerConfig(Record, Generic[P]):
    """All that a worker process is told."""

    plan: SerializeAsAny[P]
    seat: Seat


class StepRow(Record):
    """One training step, seen by rank 0.

    Attributes:
        loss: training loss in nats, mean over all ranks.
        bytes_sent: bytes that rank 0 sent for the gradients, all included.
        step_s: batch in hand to parameters updated; the sum of the next three.
        compute_s: forward, backward and optimiser.
        codec_s: compressing and decompressing.
        wire_s: sending and waiting for the other ranks.
        elapsed_s: wall-clock time since training began.
    """

    kind: Literal["step"] = "step"
    step: int
    loss: float
    bytes_sent: int
    step_s: float
    compute_s: float
    codec_s: float
    wire_s: float
    elapsed_s: float


class FinalRow(Record):
    """What is known when a run has ended.

    Attributes:
        validation_loss: mean over the held-out sequences, in nats.
        vnmse: squared error of one more batch's mean gradient, over its squared norm.
        bits_per_entry: bits sent per gradient entry and pass, all metadata included.
    """

    kind: Literal["final"] = "final"
    validation_loss: float
    vnmse: float
    bits_per_entry: float


Row = Annotated[StepRow | FinalRow, Field(discriminator="kind")]
_ROW: TypeAdapter[StepRow | FinalRow] = TypeAdapter(Row)


def read_row(line: str) -> StepRow | FinalRow:
    """Return the row that a worker wrote on one line."""
    return _ROW.validate_json(line)


class Run(Record):
    """One finished run."""

    plan: Plan
    rows: tuple[StepRow, ...]
    final: FinalRow

    def mean(self, column: str) -> float:
        """Return a column's mean over the steps, without the first, which opens connections."""
        rows = self.rows[1:] or self.rows
        return sum(float(getattr(row, column)) for row in rows) / len(rows)


class Link(Record):
    """The network the ranks trained over.

    Attributes:
        kind: "namespaces" (one rate-limited host per rank) or "loopback" (no limit).
        rate_mbit: the limit that was set; ``None`` on loopback.
        measured_mbit: TCP payload rate between two hosts before training; ``None`` on loopback.
        why_loopback: the reason there are no hosts; empty with namespaces.
    """

    kind: Literal["namespaces", "loopback"]
    rate_mbit: float | None = None
    measured_mbit: float | None = None
    why_loopback: str = ""


class Results(Record):
    """A comparison: the reference run first, then the run with compression.

    Attributes:
        format: version of this layout; it changes iff a field changes its name or meaning.
        command: repeats it.
        sentence: the conclusion, computed from the rows.
    """

    format: Literal[1] = 1
    command: str
    environment: dict[str, Any]
    link: Link
    runs: tuple[Run, Run]
    sentence: str

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the results written as JSON."""
        return cls.model_validate_json(text)
