"""What is trained: the contract, the workloads by name, and the language model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from evaluation import language_model
from evaluation.language_model import Batches
from evaluation.reviews import Tokens, load_tokens
from evaluation.study.records import SGD_MOMENTUM, Evaluation, OptimizerName, Settings


class Workload(Protocol):
    """One training task, with everything random in it decided by the seed it was made with."""

    @property
    def clip(self) -> float | None:
        """The norm that the mean gradient is clipped to, if it is."""

    def build(self) -> nn.Module:
        """Return the model with its initial weights."""

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LambdaLR]:
        """Return the optimiser and the schedule of its rates: step the one, then the other."""

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        """Return the mean training loss of one rank's batch at one step."""

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Measure the model on held-out data; the model stays as it is, and in training mode."""


@dataclass(frozen=True)
class LanguageModel:
    """Workload (b): the demo's decoder, from scratch; no clipping, as in the demo.

    Four ranks of 8 sequences of 128 tokens; the demo's AdamW, or SGD with the demo's schedule.
    """

    settings: Settings
    batches: Batches
    clip: float | None = None

    @classmethod
    def of(cls, settings: Settings) -> "LanguageModel":
        """Load the text."""
        return cls(settings, Batches(_tokens(), settings.seed, settings.world_size, sequences=8))

    def build(self) -> nn.Module:
        return language_model.build_model(self.settings.seed)

    def optimizer(self, model: nn.Module) -> tuple[Optimizer, LambdaLR]:
        settings = self.settings
        adamw, schedule = language_model.build_optimizer(
            model, peak=settings.learning_rate, steps=settings.steps
        )
        if settings.optimizer == "adamw":
            return adamw, schedule
        groups = [{"params": g["params"], "lr": g["initial_lr"]} for g in adamw.param_groups]
        sgd = torch.optim.SGD(groups, momentum=SGD_MOMENTUM)
        return sgd, LambdaLR(sgd, schedule.lr_lambdas)

    def loss(self, model: nn.Module, step: int, rank: int) -> Tensor:
        return language_model.mean_loss(model, self.batches.train(step, rank))

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Measure the loss of 256 held-out sequences, the same for every seed."""
        every = replace(self.batches, world_size=1, sequences=32)
        total, count = language_model.summed_validation_loss(model, every.validation(0, 256))
        return Evaluation(loss=(total / count).item())


@cache
def _tokens() -> Tokens:
    return load_tokens()


def _language_model(settings: Settings) -> Workload:
    return LanguageModel.of(settings)


def _questions(settings: Settings) -> Workload:
    from evaluation.study.questions import QuestionClasses

    return QuestionClasses.of(settings)


def _sentences(settings: Settings) -> Workload:
    from evaluation.study.sentences import SentenceClasses

    return SentenceClasses.of(settings)


WORKLOADS: dict[str, Callable[[Settings], Workload]] = {
    "language_model": _language_model,
    "questions": _questions,
    "sentences": _sentences,
}
# Peaks; AdamW's for the language model is the demo's. The others come from short scans of the
# uncompressed run with seed 0; held-out losses at the end, SGD with momentum 0.9:
# language model, 30 steps: 8.00 with 0.1, 7.10 with 0.5, 6.83 with 1; 3 diverged, and 1 did in the
# 90 steps of a run.
# questions, 40 steps: 0.768 with 0.03, 0.575 with 0.1, 0.645 with 0.3.
# AdamW, questions: 84.6 % with 5e-5 after 240 steps, 88.0 % with 2e-4 after 120.
LEARNING_RATES: dict[tuple[str, OptimizerName], float] = {
    ("language_model", "adamw"): 3e-3,
    ("language_model", "sgd"): 0.5,
    ("questions", "adamw"): 2e-4,
    ("questions", "sgd"): 1e-1,
    ("sentences", "adamw"): 5e-5,
}
