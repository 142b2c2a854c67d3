"""One run: virtual ranks in one process, whose gradients are all-reduced by the real algorithm.

The ranks share one model. Each one's gradient is computed on its own batch in turn; the rows of
float32[ranks, d] then go through ``simulate`` as one bucket that holds the whole gradient, with
the states of the call before, and the optimiser steps with the mean.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dynamiq import Call, Compressor, State, Topology
from dynamiq.core.metrics import simulate
from evaluation.study.records import Checkpoint, ErrorSample, Row, Settings
from evaluation.study.workloads import Workload

ERRORS_EVERY = 10
CHECKPOINTS = 4
_EXACT_BITS = 32.0
# Entries whose squares in float64 stay in a core's cache.
_PIECE = 1 << 16


@dataclass
class Reduction:
    """The mean over ranks, exact or compressed, call after call."""

    compressor: Compressor | None
    topology: Topology
    seed: int
    bits_per_entry: list[float] = field(default_factory=list)
    _states: list[State] | None = None

    def mean(self, rows: Tensor, number: int) -> Tensor:
        """Return float32[d], the mean of float32[ranks, d] as call ``number`` gives it."""
        if self.compressor is None:
            self.bits_per_entry.append(_EXACT_BITS)
            return rows.mean(0)
        call = Call(self.seed, number, divisor=len(rows))
        done = simulate(rows, self.compressor, self.topology, call, self._states)
        self._states = done.states
        self.bits_per_entry.append(done.bits_per_entry)
        return done.result


class Training:
    """A run from its first to its last step."""

    def __init__(self, settings: Settings, workload: Workload, reduction: Reduction) -> None:
        """Build the model and room for the gradients of all ranks."""
        self.settings, self.workload, self.reduction = settings, workload, reduction
        self.model = workload.build()
        self.optimizer, self.schedule = workload.optimizer(self.model)
        self.parameters = list(self.model.parameters())
        numel = sum(p.numel() for p in self.parameters)
        self.rows = torch.empty(settings.world_size, numel)
        self.losses: list[float] = []
        self.errors: list[ErrorSample] = []
        self.checkpoints: list[Checkpoint] = []
        self.training_s = 0.0

    def run(self, versions: dict[str, str | None], commit: str) -> Row:
        """Train to the end."""
        steps = self.settings.steps
        ends = {-(-steps * k // CHECKPOINTS) for k in range(1, CHECKPOINTS + 1)}
        for step in range(steps):
            began = time.perf_counter()
            self._step(step)
            self.training_s += time.perf_counter() - began
            if step + 1 in ends:
                held_out = self.workload.evaluate(self.model)
                self.checkpoints.append(Checkpoint(step=step + 1, held_out=held_out))
        return Row(
            settings=self.settings,
            checkpoints=tuple(self.checkpoints),
            training_loss=fmean(self.losses[-max(1, steps // 10) :]),
            errors=tuple(self.errors),
            bits_per_entry=fmean(self.reduction.bits_per_entry),
            training_s=self.training_s,
            versions=versions,
            commit=commit,
        )

    def _step(self, step: int) -> None:
        self._gradients(step)
        mean = self.reduction.mean(self.rows, step)
        # Clipping changes the mean in place.
        measured = mean.clone() if step % ERRORS_EVERY == 0 else None
        _set_gradients(self.parameters, mean)
        if self.workload.clip is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.workload.clip)
        self.optimizer.step()
        self.schedule.step()
        if measured is not None:
            moments = second_moments(self.optimizer, self.parameters)
            self.errors.append(error_sample(step, self.rows, measured, moments))

    def _gradients(self, step: int) -> None:
        """Fill each rank's row; autograd adds into it, so that nothing is copied."""
        self.rows.zero_()
        losses = []
        for rank, row in enumerate(self.rows):
            _set_gradients(self.parameters, row)
            loss = self.workload.loss(self.model, step, rank)
            loss.backward()
            losses.append(loss.item())
        self.losses.append(fmean(losses))


def second_moments(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Return float32[d], Adam's running means of squared gradients, or ``None`` without Adam."""
    moments = [optimizer.state[p].get("exp_avg_sq") for p in parameters]
    if any(moment is None for moment in moments):
        return None
    return torch.cat([moment.flatten() for moment in moments])


@torch.no_grad()
def error_sample(step: int, rows: Tensor, mean: Tensor, moments: Tensor | None) -> ErrorSample:
    """Compare a mean float32[d] with that of the rows float32[ranks, d], in float64."""
    plain, weighted, adam = (torch.zeros(2, dtype=torch.float64) for _ in range(3))
    for start in range(0, len(mean), _PIECE):
        piece = slice(start, start + _PIECE)
        x = rows[:, piece].double()
        exact = x.mean(0)
        squares = torch.stack([(mean[piece].double() - exact).square(), exact.square()])
        plain += squares.sum(1)
        weighted += squares @ _inverse(x.square().mean(0))
        if moments is not None:
            adam += squares @ _inverse(moments[piece].double())
    return ErrorSample(
        step=step,
        vnmse=_ratio(plain),
        weighted=_ratio(weighted),
        adam=None if moments is None else _ratio(adam),
    )


def _inverse(v: Tensor) -> Tensor:
    return torch.where(v > 0, 1 / v, 0.0)


def _ratio(sums: Tensor) -> float:
    error, norm = sums.tolist()
    return error / norm if norm else 0.0


def _set_gradients(parameters: Sequence[nn.Parameter], flat: Tensor) -> None:
    """Make consecutive parts of float32[d] the parameters' gradients."""
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
