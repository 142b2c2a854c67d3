"""A plain training loop: average all gradients in one call per step.

torchrun --nproc-per-node 2 examples/training_loop.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dynamiq import Butterfly, DynamiQCompressor, GlooTransport, Pipeline


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    pipeline = Pipeline(DynamiQCompressor(bit_budget=4), Butterfly(), GlooTransport())
    data = torch.Generator().manual_seed(dist.get_rank())

    for step in range(20):
        x = torch.randn(32, 64, generator=data)
        loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()

        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        bucket = parameters_to_vector(gradients)
        pipeline.all_reduce(bucket, op="mean", key="gradients")
        vector_to_parameters(bucket, gradients)

        optimizer.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.4f}")

    if dist.get_rank() == 0:
        print(f"bits per entry on the wire: {pipeline.metrics().bits_per_entry:.2f}")
    pipeline.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
