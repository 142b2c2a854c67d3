"""Training steps with DDP, by every method of a run in turn."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from evaluation.bench.collectives import pipeline_of
from evaluation.bench.records import Existing, Measured, Method, TrainingTask
from evaluation.bench.stopwatch import Stopwatch, gather
from evaluation.bench.workloads import workload
from evaluation.study.workloads import Workload

# The first step of a model finds out how its buckets should be cut, and PowerSGD begins with the
# third of its first turn.
_UNTIMED_STEPS = 3
_ONE_BUCKET_MIB = 4096.0

Gradient = torch.futures.Future[Tensor]
Hook = Callable[[Any, Any], Gradient]


@dataclass
class _Contender:
    """A method's hook, its state, and its largest bucket; ``None`` means DDP's own."""

    watch: Stopwatch
    hook: Hook | None = None
    state: object = None
    bucket_mib: float | None = None


def measure_training(task: TrainingTask, ready: Callable[[], None]) -> tuple[Measured, ...]:
    """Return what all ranks have measured; collective.

    Args:
        task: what to do.
        ready: called on all ranks when every method has had its first turn.
    """
    with ExitStack() as stack:
        contenders = [stack.enter_context(_contender(m, task)) for m in task.methods]
        turns = _Turns(workload(task))
        for contender in contenders:
            turns.warm_up(contender)
        ready()
        for _ in range(task.rounds):
            for contender in contenders:
                turns.take(contender, task.steps)
        return gather([contender.watch for contender in contenders])


class _Turns:
    """One model, which every method trains anew from the same weights."""

    def __init__(self, work: Workload) -> None:
        self._workload = work
        self._model = work.build()
        self._start = {name: w.clone() for name, w in self._model.state_dict().items()}

    def warm_up(self, contender: _Contender) -> None:
        """Do the untimed steps, and note what the last of them sends."""
        step = self._begin(contender, _UNTIMED_STEPS - 1)
        with contender.watch.count_bytes():
            step(_UNTIMED_STEPS - 1)

    def take(self, contender: _Contender, steps: int) -> None:
        """Do the untimed steps, then timed ones."""
        step = self._begin(contender, _UNTIMED_STEPS)
        for number in range(_UNTIMED_STEPS, _UNTIMED_STEPS + steps):
            dist.barrier()
            with contender.watch.lap():
                step(number)

    def _begin(self, contender: _Contender, steps: int) -> Callable[[int], None]:
        """Wrap the model for a method and do some steps; returns what does one."""
        self._model.load_state_dict(self._start)
        optimizer, _ = self._workload.optimizer(self._model)
        # All ranks start from the same weights already.
        options: dict[str, Any] = {"init_sync": False, "forward_sync_buffers": False}
        ddp = DistributedDataParallel(self._model, bucket_cap_mb=contender.bucket_mib, **options)
        if contender.hook is not None:
            ddp.register_comm_hook(contender.state, contender.hook)

        def step(number: int) -> None:
            optimizer.zero_grad()
            self._workload.loss(ddp, number, dist.get_rank()).backward()
            optimizer.step()

        for number in range(steps):
            step(number)
        return step


@contextmanager
def _contender(method: Method, task: TrainingTask) -> Iterator[_Contender]:
    if isinstance(method, Existing):
        yield _existing(method, task.bucket_mib)
        return
    with pipeline_of(method, task.seed) as pipeline:
        watch = Stopwatch(method, pipeline)
        yield _Contender(watch, pipeline.ddp_hook, bucket_mib=task.bucket_mib)


def _existing(method: Existing, bucket_mib: float | None) -> _Contender:
    watch = Stopwatch(method, None)
    if method.name == "powersgd":
        # It deadlocks over Gloo with several buckets.
        state = PowerSGDState(None, start_powerSGD_iter=2)
        return _Contender(watch, powerSGD_hook, state, _ONE_BUCKET_MIB)
    hooks: dict[str, Hook] = {
        "bf16": _bf16_over_gloo,
        "fp16": fp16_compress_hook,
        "none": _leave_alone,
    }
    return _Contender(watch, hooks.get(method.name), bucket_mib=bucket_mib)


# DDP insists on the annotation, and refuses torch's BF16 hook by its name where there is no NCCL.
def _bf16_over_gloo(group: Any, bucket: dist.GradBucket) -> Gradient:  # type: ignore[name-defined]
    result: Gradient = bf16_compress_hook(group, bucket)
    return result


def _leave_alone(_: object, bucket: dist.GradBucket) -> Gradient:  # type: ignore[name-defined]
    result: Gradient = torch.futures.Future()
    result.set_result(bucket.buffer())
    return result
