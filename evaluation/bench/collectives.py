"""All-reduces of one tensor, by every method of a run in turn."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq import GlooTransport, Pipeline
from dynamiq.core.metrics import vnmse
from evaluation.bench.records import AllReduceTask, Existing, Measured, Method, Ours
from evaluation.bench.stopwatch import Stopwatch, gather

_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_GROUP = 256
# Connections are opened by the first call, and DynamiQ learns from each of its first four, later
# from one in eight.
WARM_UP_CALLS = 4
# At the lowest rates one message takes minutes.
TIMEOUT_S = 1800


@dataclass
class _Contender:
    reduce: Callable[[Tensor], object]
    watch: Stopwatch


def measure_all_reduces(task: AllReduceTask, ready: Callable[[], None]) -> tuple[Measured, ...]:
    """Return what all ranks have measured; collective.

    Args:
        task: what to do.
        ready: called on all ranks when every method has done its first calls.
    """
    x = entries(task.tensor_bytes // 4, task.seed, dist.get_rank())
    work = torch.empty_like(x)
    with ExitStack() as stack:
        contenders = [stack.enter_context(_contender(m, task.seed)) for m in task.methods]
        _warm_up(contenders, x, work)
        ready()
        for _ in range(task.rounds):
            for contender in contenders:
                work.copy_(x)
                dist.barrier()
                with contender.watch.lap():
                    contender.reduce(work)
        return gather([contender.watch for contender in contenders])


def entries(count: int, seed: int, rank: int) -> Tensor:
    """Return float32[count] with large and small regions, which the ranks share.

    Normal values, times a scale per 256 entries that is log-normal: as uneven as gradients are.
    """
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed((seed << 16) + rank + 1)
    scales = torch.randn(-(-count // _GROUP), generator=shared).exp_()
    return torch.randn(count, generator=own).mul_(scales.repeat_interleave(_GROUP)[:count])


@contextmanager
def pipeline_of(
    method: Ours, seed: int, transport: GlooTransport | None = None
) -> Iterator[Pipeline]:
    """Be connected, and compress from the first step of a training on."""
    transport = transport or GlooTransport(timeout_s=TIMEOUT_S)
    pipeline = Pipeline(
        method.compressor,
        method.topology,
        transport,
        seed=seed,
        start_step=0,
        segments=method.segments,
    )
    with pipeline:
        pipeline.connect()
        yield pipeline


@contextmanager
def _contender(method: Method, seed: int) -> Iterator[_Contender]:
    if isinstance(method, Existing):
        yield _Contender(_gloo(_FORMATS[method.name]), Stopwatch(method, None))
        return
    with pipeline_of(method, seed) as pipeline:
        # A key, which compressors with a state need; the others do without.
        yield _Contender(
            lambda x: pipeline.all_reduce(x, "sum", key="bench"), Stopwatch(method, pipeline)
        )


def _gloo(dtype: torch.dtype) -> Callable[[Tensor], object]:
    def reduce(x: Tensor) -> None:
        sent = x.to(dtype)  # x itself if it has that dtype
        dist.all_reduce(sent)
        if sent is not x:
            x.copy_(sent)

    return reduce


def _warm_up(contenders: Sequence[_Contender], x: Tensor, work: Tensor) -> None:
    """Let each method come to what it does in the long run."""
    exact = None
    for contender in contenders:
        if contender.watch.method == Existing(name="fp32"):
            exact = x.clone()
            contender.reduce(exact)
    for contender in contenders:
        calls = WARM_UP_CALLS if isinstance(contender.watch.method, Ours) else 2
        for _ in range(calls - 1):
            contender.reduce(work.copy_(x))
        work.copy_(x)
        with contender.watch.count_bytes():
            contender.reduce(work)
        if exact is not None:
            contender.watch.note_error(vnmse(work, exact))
