"""What the errors of several seeds say, in float64."""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Target:
    """What an all-reduce should give.

    Attributes:
        total: float64[d], the exact sum over ranks.
        mean_square: float64[d], the mean over ranks of the squared entries.
    """

    total: Tensor
    mean_square: Tensor

    @classmethod
    def of(cls, gradients: Tensor) -> "Target":
        """Return the target of float32[n, d]."""
        sums = Sums(gradients.shape[1])
        for row in gradients:
            sums.add(row)
        return sums.target(len(gradients))

    @classmethod
    def joined(cls, parts: Sequence["Target"]) -> "Target":
        """Return the target of parts that lie one after the other."""
        return cls(
            torch.cat([part.total for part in parts]),
            torch.cat([part.mean_square for part in parts]),
        )


class Sums:
    """Sums and sums of squares over ranks, as ranks come by."""

    def __init__(self, numel: int) -> None:
        """Begin at zero."""
        self._entries, self._total, self._square = torch.zeros(3, numel, dtype=torch.float64)

    def add(self, x: Tensor) -> None:
        """Add one rank's float32[d]."""
        self._entries.copy_(x)
        self._total += self._entries
        self._square.addcmul_(self._entries, self._entries)

    def target(self, world_size: int) -> Target:
        """Return what was added, as the target of an all-reduce."""
        return Target(self._total, self._square / world_size)


def relative(error: Tensor, target: Target) -> float:
    """Return ‖e‖² / ‖x‖²; 0 if both are zero."""
    return _ratio(_squared(error), _squared(target.total))


def weighted(error: Tensor, target: Target) -> float:
    """Return Σ e_i²/v_i over Σ x_i²/v_i, entries with v_i = 0 left out."""
    v = target.mean_square
    weight = torch.where(v > 0, 1.0 / v, 0.0)
    squares = (t.double().square() for t in (error, target.total))
    return _ratio(*((weight * square).sum().item() for square in squares))


def bias(errors: Sequence[Tensor]) -> tuple[float | None, float | None]:
    """Return the share of the squared error that all seeds have in common, and its standard error.

    E⟨e_s, e_t⟩ of two independent calls is ‖bias‖², so the mean over pairs estimates it without
    the noise that the norm of a mean error has.
    """
    if len(errors) < 2:
        return None, None
    power = statistics.fmean(_squared(error) for error in errors)
    if power == 0.0:
        return 0.0, 0.0
    pairs = [
        torch.dot(a.double(), b.double()).item() / power
        for a, b in itertools.combinations(errors, 2)
    ]
    spread = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else None
    return statistics.fmean(pairs), spread


def _squared(x: Tensor) -> float:
    return x.double().square().sum().item()


def _ratio(error: float, norm: float) -> float:
    return error / norm if norm else (float("inf") if error else 0.0)
