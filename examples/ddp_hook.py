"""DistributedDataParallel with compressed gradients: two lines more than without.

torchrun --nproc-per-node 2 examples/ddp_hook.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq import Butterfly, DynamiQCompressor, GlooTransport, Pipeline


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    pipeline = Pipeline(DynamiQCompressor(bit_budget=4), Butterfly(), GlooTransport())
    model.register_comm_hook(None, pipeline.ddp_hook)

    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        x = torch.randn(32, 64, generator=data)
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    metrics = pipeline.metrics()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}, bits per entry {metrics.bits_per_entry:.2f}")
        print(f"uncompressed calls: {dict(metrics.skips)}")
    pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
