"""Four ranks in one process: try a compressor without a cluster.

python examples/all_reduce_in_one_process.py
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from dynamiq import Butterfly, DynamiQCompressor, LoopbackTransport, Pipeline, vnmse

RANKS = 4
gradients = torch.randn(RANKS, 100_000, generator=torch.Generator().manual_seed(0))


def reduce(transport: LoopbackTransport) -> tuple[Tensor, float]:
    """Average one rank's gradient with the others'; return it and the bits per entry."""
    compressor = DynamiQCompressor(bit_budget=4)
    with Pipeline(compressor, Butterfly(), transport) as pipeline:
        mine = gradients[pipeline.transport.rank].clone()
        pipeline.all_reduce(mine, op="mean")
        return mine, pipeline.metrics().bits_per_entry


def main() -> None:
    with ThreadPoolExecutor(RANKS) as threads:
        results = list(threads.map(reduce, LoopbackTransport.world(RANKS)))
    means = [mean for mean, _ in results]
    assert all(torch.equal(means[0], mean) for mean in means), "all ranks have the same bits"
    print(f"bits per entry on the wire: {results[0][1]:.2f} instead of 32")
    print(f"vNMSE: {vnmse(means[0], gradients.mean(0)):.1e}")


if __name__ == "__main__":
    main()
