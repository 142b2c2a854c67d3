"""One collective as a user asked for it."""

import operator
from dataclasses import dataclass

from torch import Tensor

from dynamiq.core.errors import InputError
from dynamiq.core.layout import Layout
from dynamiq.pipeline.inputs import Op


@dataclass(frozen=True)
class Request:
    """A checked request.

    Attributes:
        collective: "all_reduce" or "reduce_scatter".
        tensor: This rank's entries; an all-reduce writes its result here.
        output: Where a reduce-scatter writes, or None.
        op: "mean" or "sum".
        key: Names the state that belongs to this tensor, or None.
        name: What error messages call it.
        bounds: Chunk boundaries of a reduce-scatter, or None.
        skip: Why it must travel uncompressed, or None.
        contents: What the tensor is made of, for messages about its values.
    """

    collective: str
    tensor: Tensor
    output: Tensor | None
    op: Op
    key: str | None
    name: str
    bounds: tuple[int, ...] | None = None
    skip: str | None = None
    contents: str = ""

    @property
    def description(self) -> str:
        """What all ranks must agree on, in words."""
        t = self.tensor
        slices = "" if self.bounds is None else f" in slices {list(self.bounds)}"
        key = "" if self.key is None else f", key {self.key!r}"
        return f'{self.collective} "{self.op}" of {t.dtype}[{t.numel()}]{slices}{key}'

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return x[d] and where the result goes; the same memory for a contiguous all-reduce."""
        x = self.tensor.detach().reshape(-1)
        return x, x if self.output is None else self.output.detach().view(-1)

    def deliver(self, out: Tensor) -> Tensor:
        """Copy a result back if strides did not allow to write it in place; return the tensor."""
        if self.output is not None:
            return self.output
        if out.data_ptr() != self.tensor.data_ptr():
            self.tensor.detach().copy_(out.view(self.tensor.shape))
        return self.tensor


def check_slices(
    output: Tensor, tensor: Tensor, bounds: tuple[int, ...] | None, rank: int, world_size: int
) -> tuple[int, ...]:
    """Return the slices of a reduce-scatter, equal ones if none are given.

    Raises:
        InputError: ``output`` cannot hold this rank's slice of ``tensor``.
    """
    if bounds is None:
        if output.numel() * world_size != tensor.numel():
            raise InputError(
                f"input has {tensor.numel()} entries, but {world_size} equal slices of output's "
                f"{output.numel()} have {output.numel() * world_size}; pad the input to a multiple "
                f"of the world size, or give bounds"
            )
        bounds = tuple(output.numel() * r for r in range(world_size + 1))
    try:
        bounds = tuple(operator.index(bound) for bound in bounds)
    except TypeError:
        raise InputError(f"bounds must be integers, got {bounds!r}") from None
    if output.dtype is not tensor.dtype or output.device != tensor.device:
        raise InputError(
            f"output is {output.dtype} on {output.device}, input is {tensor.dtype} on "
            f"{tensor.device}; they must be alike"
        )
    if not output.is_contiguous():
        raise InputError(f"output with strides {output.stride()} must be contiguous")
    Layout(tensor.numel(), world_size, bounds=bounds)
    expected = bounds[rank + 1] - bounds[rank]
    if output.numel() != expected:
        raise InputError(
            f"output has {output.numel()} entries, but the slice of rank {rank} has {expected}"
        )
    return bounds
