"""Worlds of threads for tests of whole pipelines: every rank of a loopback world runs a function.

def total(pipeline):
    x = torch.ones(3)
    pipeline.all_reduce(x, "sum")
    return x

assert torch.equal(run_world(total, 4)[0], torch.full((3,), 4.0))
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynamiq import Compressor, LoopbackTransport, Pipeline, Ring, Topology, Transport, Uncompressed
from dynamiq.core.message import Call
from tests.contracts import compressor as contract


def build(transport: Transport, **options: Any) -> Pipeline:
    """Return a pipeline for tensors of any size; by default uncompressed, over a ring."""
    compressor = options.pop("compressor", Uncompressed())
    topology = options.pop("topology", Ring())
    return Pipeline(compressor, topology, transport, **{"min_numel": 0, **options})


def run_world(
    function: Callable[[Pipeline], Any],
    world_size: int,
    *,
    catch: bool = False,
    rendezvous: bool = False,
    timeout_s: float = 20.0,
    limit_s: float = 40.0,
    of_rank: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> list[Any]:
    """Call ``function(pipeline)`` in a thread per rank; return the results by rank.

    Args:
        function: May use ``pipeline.transport.rank``, which a loopback transport always has.
        world_size: Number of ranks.
        catch: Return exceptions as results instead of raising the first.
        rendezvous: As in LoopbackTransport.world.
        timeout_s: After which a wait for a silent peer ends.
        limit_s: After which the test fails, with what the late ranks do.
        of_rank: Options in which ranks differ.
        options: Those of the pipeline.
    """
    transports = LoopbackTransport.world(world_size, rendezvous=rendezvous, timeout_s=timeout_s)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            pipeline = build(transports[rank], **{**options, **of_rank(rank)})
            results[rank] = function(pipeline)
        except BaseException as error:  # noqa: BLE001 - returned or raised in the test's thread
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(world_size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if late:
        frames = sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[threads[r].ident])[-4:]) for r in late]
        raise AssertionError(f"ranks {late} hang:\n" + "\n".join(stacks))
    if not catch:
        for result in results:
            if isinstance(result, BaseException):
                raise result
    return results


def lockstep(
    x: Tensor, compressor: Compressor, topology: Topology, op: str = "sum", number: int = 0
) -> Tensor:
    """Return what an all-reduce of the rows of x[n, ...] must give, in their dtype and shape.

    Args:
        x: Row i the tensor of rank i.
        compressor: As in the pipeline.
        topology: As in the pipeline.
        op: "sum" or "mean".
        number: The call's number in its pipeline.
    """
    call = Call(0, number, len(x) if op == "mean" else 1)
    outs = contract.all_reduce(
        compressor, topology, x.flatten(1), call=call, out_dtype=x.dtype
    ).outs
    return outs[0].view(x.shape[1:])


def rank_of(pipeline: Pipeline) -> int:
    """Return the rank, also before the pipeline is connected."""
    return pipeline.transport.rank


def integers(world_size: int, *shape: int) -> Tensor:
    """Return float32[n, ...] of small integers, whose sums are exact."""
    generator = torch.Generator().manual_seed(world_size)
    return torch.randint(-999, 1000, (world_size, *shape), generator=generator).float()


def same(results: list[Tensor], expected: Tensor) -> bool:
    """Return whether all ranks have these bits."""
    return all(contract.same_bits(result, expected) for result in results)
