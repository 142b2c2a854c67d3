"""Pipelines of CUDA tensors give the bits of their simulation on the CPU."""

import pytest
import torch
import torch.distributed as dist

from dynamiq import Butterfly, Direct, DynamiQCompressor, GlooTransport, NCCLTransport, Ring
from tests.contracts.compressor import sample
from tests.integrations.worlds import build, lockstep, same
from tests.processes import run_ranks

PAPER = DynamiQCompressor.paper()


def all_reduce_on_one_gpu(rank, x, topology, op):
    """All-reduce rank's row of x[n, ...], in the foreground and in the background."""
    torch.cuda.set_device(0)
    options = {"compressor": PAPER, "topology": topology}
    with build(GlooTransport(timeout_s=60), **options) as pipeline:
        results = [x[rank].cuda() for _ in range(2)]
        pipeline.all_reduce(results[0], op)
        pipeline.all_reduce(results[1], op, async_op=True).wait()
        return [result.cpu() for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "topology", [Ring(), Butterfly(), Direct()], ids=lambda topology: topology.kind
)
@pytest.mark.parametrize("world_size", [3, 4])  # division by 4 is exact
def test_processes_share_a_gpu_over_gloo(world_size, topology, dtype):
    x = sample(world_size, 300_001).to(dtype)
    results = run_ranks(all_reduce_on_one_gpu, world_size, x, topology, "mean", timeout_s=100)
    for number in range(2):
        assert same([r[number] for r in results], lockstep(x, PAPER, topology, "mean", number))


def all_reduce_alone(rank, x):
    torch.cuda.set_device(0)
    with build(NCCLTransport(timeout_s=60), compressor=PAPER) as pipeline:
        result = x.cuda()
        pipeline.all_reduce(result, "sum")
        pipeline.all_reduce(result, "mean", async_op=True).wait()
        return result.cpu(), pipeline.world_size


@pytest.mark.gpu
@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_one_process_over_nccl():
    x = sample(1, 300_001)[0]
    ((result, world_size),) = run_ranks(all_reduce_alone, 1, x, timeout_s=100)
    assert world_size == 1
    assert torch.equal(result, x)
