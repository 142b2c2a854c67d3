"""What the steps of a benchmark train: the study's workloads."""

from evaluation import reviews
from evaluation.bench.records import TrainingTask
from evaluation.study import questions, sentences
from evaluation.study.records import Settings
from evaluation.study.workloads import LEARNING_RATES, WORKLOADS, Workload

NAMES = tuple(WORKLOADS)
# Only the schedule of the rates depends on it.
_STEPS = 1000


def missing_packages(name: str) -> str:
    """Return what a workload needs and is not installed, and how to get it; or nothing."""
    missing = {
        "language_model": reviews.missing_packages,
        "questions": questions.missing_packages,
        "sentences": sentences.missing_packages,
    }
    return missing[name]()


def workload(task: TrainingTask) -> Workload:
    """Return the workload of a task, with AdamW."""
    settings = Settings(
        workload=task.workload,
        recipe="uncompressed",
        bits=None,
        compressor=None,
        topology="ring",
        optimizer="adamw",
        learning_rate=LEARNING_RATES[task.workload, "adamw"],
        steps=_STEPS,
        seed=task.seed,
        world_size=task.world_size,
    )
    return WORKLOADS[task.workload](settings)
