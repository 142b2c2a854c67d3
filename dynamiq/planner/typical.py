"""What is assumed of a training of which only the size is known."""

from itertools import pairwise
from typing import Any

from dynamiq.planner.spectrum import GradientSpectrum
from dynamiq.planner.workload import Gradient, WorkloadProfile

_LOG2_ENERGIES = (
    5.8,
    4.24,
    3.55,
    3.09,
    2.18,
    1.49,
    1.35,
    0.65,
    0.29,
    -0.2,
    -0.35,
    -0.52,
    -0.66,
    -0.86,
    -1.06,
    -1.17,
    -1.26,
    -1.34,
    -1.43,
    -1.53,
    -1.64,
    -1.7,
    -1.71,
    -1.74,
    -1.75,
    -1.78,
    -1.9,
    -1.95,
    -1.98,
    -2.02,
    -2.04,
    -2.06,
    -2.08,
    -2.1,
    -2.11,
    -2.18,
    -2.25,
    -2.28,
    -2.29,
    -2.35,
    -2.43,
    -2.44,
    -2.48,
    -2.51,
    -2.53,
    -2.55,
    -2.56,
    -2.57,
    -2.6,
    -2.62,
    -2.65,
    -2.66,
    -2.68,
    -2.71,
    -2.74,
    -2.76,
    -2.78,
    -2.81,
    -2.84,
    -2.87,
    -2.89,
    -2.94,
    -2.98,
    -2.99,
    -3.01,
    -3.03,
    -3.03,
    -3.04,
    -3.08,
    -3.1,
    -3.15,
    -3.19,
    -3.23,
    -3.28,
    -3.32,
    -3.37,
    -3.38,
    -3.41,
    -3.46,
    -3.5,
    -3.54,
    -3.6,
    -3.62,
    -3.64,
    -3.66,
    -3.72,
    -3.83,
    -3.87,
    -3.92,
    -3.97,
    -4,
    -4.13,
    -4.23,
    -4.32,
    -4.43,
    -4.53,
    -4.57,
    -4.65,
    -4.69,
    -4.77,
    -4.83,
    -5.16,
    -5.49,
    -6.05,
    -6.96,
    -7.5,
    -8.38,
    -9.13,
    -9.78,
    -10.28,
    -10.95,
    -11.4,
    -11.86,
    -12.52,
    -13.34,
    -13.81,
    -14.94,
    -15.59,
    -15.8,
    -16.09,
    -16.6,
    -17.25,
    -18.14,
    -19.45,
    -20.44,
    -20.65,
    -22.23,
    -24.3,
)
"""Of 128 equal parts of the supergroups, in descending order: log2 of the mean energy, relative to
that of all."""
SPECTRUM = GradientSpectrum(
    energies=tuple(2.0**x for x in _LOG2_ENERGIES), world_size=8, correlation=0.140
)
"""Of gradients of a language model, SmolLM2-135M (tests/data/smollm2_gradients.safetensors)."""

_ENTRIES = 1 << 20
_LEAST, _MOST = 64, 4096


def evenly_ready(parameters: int, backward_s: float, step_s: float, dtype: Any) -> WorkloadProfile:
    """Return a workload whose gradients become ready at an even pace.

    Args:
        parameters: Entries of all gradients.
        backward_s: The backward pass.
        step_s: A step.
        dtype: Of the gradients.

    Raises:
        ConfigurationError: No such dtype.
    """
    count = min(max(parameters // _ENTRIES, _LEAST), _MOST, parameters)
    cuts = [parameters * i // count for i in range(count + 1)]
    gradients = tuple(
        Gradient(numel=stop - start, ready_s=backward_s * stop / parameters)
        for start, stop in pairwise(cuts)
    )
    return WorkloadProfile(
        name=f"{parameters:,} parameters",
        source="flags of the command line: gradients become ready at an even pace",
        dtype=dtype,
        step_s=step_s,
        backward_s=backward_s,
        gradients=gradients,
    )
