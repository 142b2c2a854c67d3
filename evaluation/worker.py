"""One rank of a training run: ``python -m evaluation.worker --config JSON``.

Rank 0 writes one JSON row per step on its standard output and a last one for the whole run;
whatever else is printed, here or by a library, goes to standard error.
"""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq import GlooTransport, Pipeline
from dynamiq.core.metrics import vnmse
from evaluation.language_model import (
    Batches,
    build_model,
    build_optimizer,
    mean_loss,
    summed_validation_loss,
)
from evaluation.rank import claim_stdout, orders, process_group
from evaluation.records import FinalRow, Plan, StepRow, WorkerConfig
from evaluation.reviews import load_tokens


def main() -> None:
    """Run one rank to its end."""
    config = orders(WorkerConfig[Plan], "python -m evaluation.worker", __doc__)
    rows = claim_stdout()
    with (
        process_group(config.seat, config.plan.world_size),
        _pipeline(config.plan) as pipeline,
    ):
        for row in _Training(config, pipeline).rows():
            if config.seat.rank == 0:
                print(row.model_dump_json(), file=rows, flush=True)


@dataclass
class _Training:
    config: WorkerConfig[Plan]
    pipeline: Pipeline

    def rows(self) -> Iterator[StepRow | FinalRow]:
        """Train; yields a row per step and one at the end."""
        plan, rank = self.config.plan, self.config.seat.rank
        self.batches = Batches(load_tokens(), plan.seed, plan.world_size, plan.sequences)
        model = build_model(plan.seed)
        self._warm_up(model)
        _check_equal_weights(model)
        # All ranks start from the same weights already: a broadcast over the slow link would take
        # longer than several steps.
        ddp = DistributedDataParallel(model, init_sync=False, forward_sync_buffers=False)
        ddp.register_comm_hook(None, self.pipeline.ddp_hook)
        optimizer, schedule = build_optimizer(model, peak=plan.learning_rate, steps=plan.steps)
        dist.barrier()
        began = time.perf_counter()
        for step in range(plan.steps):
            yield self._step(step, ddp, optimizer, began)
            schedule.step()
        validation = summed_validation_loss(
            model, self.batches.validation(rank, plan.validation_sequences)
        )
        dist.all_reduce(validation)
        yield FinalRow(
            validation_loss=(validation[0] / validation[1]).item(),
            bits_per_entry=self.pipeline.metrics().bits_per_entry,
            vnmse=self._vnmse(ddp),
        )

    def _step(
        self,
        step: int,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        began: float,
    ) -> StepRow:
        batch = self.batches.train(step, self.config.seat.rank)
        before, start = self.pipeline.metrics(), time.perf_counter()
        optimizer.zero_grad()
        loss = mean_loss(ddp, batch)
        loss.backward()
        optimizer.step()
        end, after = time.perf_counter(), self.pipeline.metrics()
        step_s = end - start
        codec_s, wire_s = after.codec_s - before.codec_s, after.wire_s - before.wire_s
        shown = loss.detach() / self.config.plan.world_size
        dist.all_reduce(shown)
        return StepRow(
            step=step,
            loss=shown.item(),
            bytes_sent=after.bytes_sent - before.bytes_sent,
            step_s=step_s,
            compute_s=step_s - codec_s - wire_s,
            codec_s=codec_s,
            wire_s=wire_s,
            elapsed_s=end - began,
        )

    def _vnmse(self, ddp: DistributedDataParallel) -> float:
        """Compare the mean of one more batch's gradients with the exact one, in float64."""
        batch = self.batches.train(self.config.plan.steps, self.config.seat.rank)
        ddp.zero_grad()
        with ddp.no_sync():
            mean_loss(ddp, batch).backward()
        gradient = torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
        exact = gradient.double() / self.config.plan.world_size
        dist.all_reduce(exact)
        self.pipeline.all_reduce(gradient)
        return vnmse(gradient, exact)

    def _warm_up(self, model: nn.Module) -> None:
        """Let the first pass, several times slower than the others, happen off the clock."""
        mean_loss(model, self.batches.train(0, self.config.seat.rank)).backward()
        model.zero_grad()


@contextmanager
def _pipeline(plan: Plan) -> Iterator[Pipeline]:
    pipeline = Pipeline(
        plan.compressor, plan.topology, GlooTransport(), seed=plan.seed, start_step=0
    )
    try:
        yield pipeline
    finally:
        pipeline.close()


def _check_equal_weights(model: nn.Module) -> None:
    weights = nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
    digest = hashlib.sha256(weights.tobytes()).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    if any(not torch.equal(own, other) for other in every):
        raise RuntimeError("the ranks start from different weights: the seed did not decide them")


if __name__ == "__main__":
    main()
