"""When each gradient of a training step is ready."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module, Parameter

from dynamiq.core.errors import InputError
from dynamiq.planner.profiles.workload import Gradient, WorkloadProfile

DType = Literal["float32", "bfloat16", "float16"]


def timeline(
    model: Module,
    step: Callable[[], object],
    *,
    steps: int = 8,
    warm_up: int = 3,
    name: str = "",
) -> WorkloadProfile:
    """Do training steps, and note when each parameter's gradient is ready.

    The steps should not communicate: the bare model, before DDP wraps it, or a DDP model with a
    hook that returns the bucket as it is. Where torch.distributed is initialised this is
    collective: all ranks step at once, since they may share processors, and what counts is the
    rank that takes longest. Write the profile down on one of them::

        workload = timeline(model, step)
        if dist.get_rank() == 0:
            Path("workload.json").write_text(workload.model_dump_json())

    The backward pass counts from the end of the model's forward, so the loss belongs to it, to the
    last gradient. Times are medians over the steps.

    Args:
        model: Calls of it that begin backward passes are seen; all its parameters that require
            gradients get one in every step.
        step: Does one step, forward to optimizer.
        steps: That are noted.
        warm_up: Steps before them.
        name: Of the profile, for people.

    Returns:
        A profile without spectrum. Its dtype is the one that most gradient entries have.

    Raises:
        InputError: A step did not call the model, or left a parameter without gradient.
    """
    if steps < 1 or warm_up < 0:
        raise InputError(f"timeline needs steps >= 1 and warm_up >= 0, got {steps} and {warm_up}")
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise InputError("no parameter of the model requires a gradient")
    notes = _Notes(model, parameters)
    try:
        rows = [notes.row(step) for _ in range(warm_up + steps)][warm_up:]
    finally:
        notes.remove()
    taken = torch.tensor(rows, dtype=torch.float64)
    if dist.is_available() and dist.is_initialized():
        device = notes.device if dist.get_backend() == "nccl" else "cpu"
        slowest = taken.to(device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        taken = slowest.cpu()
    step_s, *ready = taken.quantile(0.5, dim=0).tolist()
    numels = [parameter.numel() for parameter in parameters.values()]
    gradients = [Gradient(numel=n, ready_s=s) for n, s in zip(numels, ready, strict=True)]
    gradients.sort(key=lambda gradient: gradient.ready_s)
    return WorkloadProfile(
        name=name or type(model).__name__,
        source=f"dynamiq.probe.timeline, medians of {steps} steps",
        dtype=_dtype(list(parameters.values())),
        step_s=step_s,
        backward_s=gradients[-1].ready_s,
        gradients=tuple(gradients),
    )


class _Notes:
    """Marks of the moments of a step, on the clock of the device that the model is on."""

    def __init__(self, model: Module, parameters: dict[str, Parameter]) -> None:
        self.device = next(iter(parameters.values())).device
        self._names = list(parameters)
        self._forward: Any = None
        self._ready: dict[str, Any] = {}
        self._handles: list[Any] = [model.register_forward_hook(self._forward_ended)]
        for name, parameter in parameters.items():
            self._handles.append(
                parameter.register_post_accumulate_grad_hook(self._gradient_ready(name))
            )

    def row(self, step: Callable[[], object]) -> list[float]:
        """Do a step; return its seconds, then those of every gradient from the end of forward."""
        self._forward = None
        self._ready.clear()
        if dist.is_available() and dist.is_initialized():
            dist.barrier()
        began = self._mark()
        step()
        ended = self._mark()
        if self._forward is None:
            raise InputError("step() did not call the model whose backward pass is asked for")
        missing = [name for name in self._names if name not in self._ready]
        if missing:
            raise InputError(
                f"step() left {len(missing)} parameters without gradient, {missing[0]} first; set "
                f"requires_grad=False for those that are not trained"
            )
        ready = [self._between(self._forward, self._ready[name]) for name in self._names]
        return [self._between(began, ended), *ready]

    def remove(self) -> None:
        """Leave model and parameters as they were."""
        for handle in self._handles:
            handle.remove()

    def _forward_ended(self, *_: object) -> None:
        self._forward = self._mark()

    def _gradient_ready(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._ready[name] = self._mark()

        return note

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _between(self, first: Any, last: Any) -> float:
        if self.device.type != "cuda":
            return float(last - first)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def _dtype(parameters: list[Parameter]) -> DType:
    entries: Counter[str] = Counter()
    for parameter in parameters:
        entries[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    dtype = entries.most_common(1)[0][0]
    if dtype not in get_args(DType):
        raise InputError(f"gradients are {dtype}; the planner takes {', '.join(get_args(DType))}")
    return cast(DType, dtype)
