"""One rank of a benchmark: ``python -m evaluation.bench.worker --config JSON``.

Rank 0 says on its standard output when all ranks are warm, waits for SIGUSR1, and in the end
writes what was found.
"""

import signal
from collections.abc import Callable

import torch.distributed as dist

from evaluation.bench.collectives import measure_all_reduces
from evaluation.bench.records import AllReduceTask, AnyTask, Findings, Traced, TraceTask, Warm
from evaluation.bench.spans import trace_calls
from evaluation.rank import claim_stdout, orders, process_group
from evaluation.records import WorkerConfig


def main() -> None:
    """Run one rank to its end."""
    # Before any thread begins, so that all of them leave it to whoever waits for it.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    config = orders(WorkerConfig[AnyTask], "python -m evaluation.bench.worker", __doc__)
    rows, task, rank = claim_stdout(), config.plan, config.seat.rank

    def ready() -> None:
        if rank == 0:
            print(Warm().model_dump_json(), file=rows, flush=True)
            signal.sigwait([signal.SIGUSR1])
        dist.barrier()

    with process_group(config.seat, task.world_size):
        answer = _do(task, ready)
    if rank == 0:
        print(answer.model_dump_json(), file=rows, flush=True)


def _do(task: AnyTask, ready: Callable[[], None]) -> Findings | Traced:
    if isinstance(task, TraceTask):
        return trace_calls(task, ready)
    if isinstance(task, AllReduceTask):
        return Findings(measured=measure_all_reduces(task, ready))
    from evaluation.bench.training import measure_training  # needs packages that others do not

    return Findings(measured=measure_training(task, ready))


if __name__ == "__main__":
    main()
