"""One rank of a comparison with the planner: it is probed, then it trains.

Rank 0 writes what was found on its standard output.
"""

from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dynamiq import GlooTransport
from dynamiq.planner.profiles.workload import WorkloadProfile
from dynamiq.probe import probe, timeline
from evaluation.bench.collectives import TIMEOUT_S
from evaluation.bench.planned import PlannedFindings, PlannedTask
from evaluation.bench.records import TrainingTask
from evaluation.bench.training import _leave_alone as leave_alone
from evaluation.bench.training import measure_training
from evaluation.bench.workloads import workload
from evaluation.rank import claim_stdout, orders, process_group
from evaluation.records import WorkerConfig

_TIMELINE_STEPS = 8


def main() -> None:
    """Run one rank to its end."""
    config = orders(WorkerConfig[PlannedTask], "python -m evaluation.bench.planned_worker", __doc__)
    rows, task = claim_stdout(), config.plan
    _come_first()
    with process_group(config.seat, task.world_size):
        transport = GlooTransport(timeout_s=TIMEOUT_S)
        hardware = probe(transport, link_budget_s=task.link_budget_s)
        transport.close()
        findings = PlannedFindings(
            hardware=hardware,
            workload=_timeline(task.training),
            measured=measure_training(task.training, lambda: None),
        )
    if config.seat.rank == 0:
        print(findings.model_dump_json(), file=rows, flush=True)


def _come_first() -> None:
    """Leave little of the processors to other sessions, if the system lets us.

    Steps that were measured while something else ran say nothing of the planner. All ranks do the
    same, so it changes nothing between them.
    """
    with suppress(OSError):  # other systems, or no right to
        Path("/proc/self/autogroup").write_text("-20")


def _timeline(task: TrainingTask) -> WorkloadProfile:
    """Return when gradients are ready in DDP, which copies them, if nothing is sent."""
    work = workload(task)
    model = work.build()
    optimizer, _ = work.optimizer(model)
    ddp = DistributedDataParallel(model, init_sync=False, bucket_cap_mb=task.bucket_mib)
    ddp.register_comm_hook(None, leave_alone)
    number = 0

    def step() -> None:
        nonlocal number
        optimizer.zero_grad()
        work.loss(ddp, number, dist.get_rank()).backward()
        optimizer.step()
        number += 1

    return timeline(ddp, step, steps=_TIMELINE_STEPS, name=task.workload)


if __name__ == "__main__":
    main()
