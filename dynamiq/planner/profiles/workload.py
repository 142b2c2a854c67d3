"""What a training step does besides communicating, and which gradients it has."""

from typing import Annotated, Literal

from pydantic import Field

from dynamiq.core.description import Value
from dynamiq.planner.profiles.hardware import NotNegative, Positive
from dynamiq.planner.profiles.spectrum import GradientSpectrum


class Gradient(Value):
    """One parameter's gradient.

    Attributes:
        numel: Entries.
        ready_s: When it is ready, from the beginning of the backward pass, in a step that does not
            communicate.
    """

    numel: Annotated[int, Field(ge=1)]
    ready_s: NotNegative


class WorkloadProfile(Value):
    """A training step.

    Attributes:
        version: Of this format; a profile of another one is refused.
        name: For people.
        source: Where the figures come from.
        dtype: Of the gradients.
        step_s: A whole step that does not communicate, forward to optimizer.
        backward_s: Its backward pass.
        gradients: Of all parameters, in the order in which they are ready.
        spectrum: Energies of the gradients, if known; without them no error can be predicted.
    """

    version: Literal[1] = 1
    name: str
    source: str
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    step_s: Positive
    backward_s: Positive
    gradients: Annotated[tuple[Gradient, ...], Field(min_length=1)]
    spectrum: GradientSpectrum | None = None
