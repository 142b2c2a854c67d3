"""The error that a call should have: the noise of all its messages, by the model of its hops."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.compressors.dynamiq.hops import HopModel


@dataclass(frozen=True)
class Rows:
    """A spectrum by rows of supergroups.

    Attributes:
        energy: float64[d, r], of the rows' entries, summed over ranks.
        correlation: float64[r], ρ.
        pi: float64[r], π.
    """

    energy: Tensor
    correlation: Tensor
    pi: Tensor


def expected_noise(
    model: HopModel, rows: Rows, errors: Tensor, lost: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the expected squared error of each row's finished sum, and the sum's energy.

    Errors of different messages are taken as independent; correlated rounding does better.

    Args:
        model: The schedule's classes of hops.
        rows: The spectrum.
        errors: float64[d, sent, r], e of the rows' widths at each class.
        lost: bool[d, r], rows that are not sent.

    Returns:
        float64[d, r] each.
    """
    energies = model.energies(rows.energy, rows.correlation)
    noise, peaked = (arriving[:, -1] for arriving in model.arriving(energies, errors, rows.pi))
    finished = energies[:, -1]
    if model.gather:
        noise = noise + errors[:, -1] * (peaked + finished)
    return torch.where(lost, finished, noise), finished
