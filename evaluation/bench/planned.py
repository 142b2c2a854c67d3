"""What the planner is held against: a profile of the ranks, and the steps that they then took."""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from dynamiq.planner.profiles.hardware import HardwareProfile
from dynamiq.planner.profiles.workload import WorkloadProfile
from evaluation.bench.records import Measured, TrainingTask
from evaluation.records import DistributedPlan, Record
from evaluation.rows import RunRow


class PlannedTask(DistributedPlan):
    """A probe, a timeline, and training steps, on the same ranks.

    Attributes:
        training: the steps that are measured; without competing flows.
        link_budget_s: of the probe.
    """

    task: Literal["planned"] = "planned"
    training: TrainingTask
    link_budget_s: Annotated[float, Field(gt=0)] = 20.0


class PlannedFindings(Record):
    """What the ranks have found."""

    hardware: HardwareProfile
    workload: WorkloadProfile
    measured: tuple[Measured, ...]


class PlannedRow(RunRow):
    """One finished run.

    Attributes:
        command: what did it.
        found: by the ranks.
        link_mbit: TCP payload rate between two idle hosts before the run.
        machine_cores: processors of the whole machine that were busy during the run, on average.
        environment: versions and machine.
        commit: of the code.
    """

    settings: PlannedTask
    command: str
    found: PlannedFindings
    link_mbit: float
    machine_cores: float
    environment: dict[str, Any]
    commit: str


_FINDINGS = TypeAdapter(PlannedFindings)


def read_findings(line: str) -> PlannedFindings:
    """Return what rank 0 wrote on one line."""
    return _FINDINGS.validate_json(line)
