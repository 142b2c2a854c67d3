"""How good and how large: vNMSE, bits per entry, and a simulated call that measures both."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.core.agreement import HEADER_BYTES
from dynamiq.core.collective import Collective
from dynamiq.core.compressor import Compressor
from dynamiq.core.drivers import Meter, lockstep
from dynamiq.core.errors import InputError
from dynamiq.core.message import Call
from dynamiq.core.topology import Topology


@dataclass(frozen=True)
class ErrorReport:
    """What :func:`measure_error` found.

    Attributes:
        vnmse: ‖x̂ - x‖² / ‖x‖², x̂ the all-reduced sum, x the exact one (DynamiQ §2).
        bits_per_entry: Mean over ranks of bits sent per padded entry per pass; everything counted
            but the 16-byte header, two passes of (n - 1)/n of the bucket.
        bytes_sent: Bytes sent by each rank, headers included.
        result: float32[d], the all-reduced sum, the same bits on all ranks.
    """

    vnmse: float
    bits_per_entry: float
    bytes_sent: tuple[int, ...]
    result: Tensor


def vnmse(estimate: Tensor, exact: Tensor) -> float:
    """Return the vector-normalised mean squared error in float64; 0 if both are zero."""
    exact = exact.double()
    error = (estimate.double() - exact).square().sum().item()
    norm = exact.square().sum().item()
    return error / norm if norm else (float("inf") if error else 0.0)


def measure_error(
    gradients: Tensor,
    compressor: Compressor,
    topology: Topology,
    *,
    seed: int = 0,
    call: int = 0,
) -> ErrorReport:
    """All-reduce the rows of float[n, d] in this thread and compare with the exact sum.

    The simulation runs the very code of a real call, so its bytes and bits are those of a run.

    Args:
        gradients: float32, bfloat16 or float16 [n, d], row i the entries of rank i.
        compressor: The wire format.
        topology: Who sends what to whom.
        seed: Seed of the pipeline.
        call: Call number; with the seed it fixes all randomness.

    Raises:
        InputError: ``gradients`` is not a floating-point matrix.
    """
    if gradients.dim() != 2 or not gradients.is_floating_point():
        raise InputError(
            f"measure_error takes a floating-point tensor [ranks, entries], got "
            f"{gradients.dtype}{list(gradients.shape)}"
        )
    n, d = gradients.shape
    schedule = topology.schedule(n)
    meters = [Meter() for _ in range(n)]
    outs = [torch.empty(d, dtype=torch.float32) for _ in range(n)]
    collectives = [Collective(compressor, schedule, r, d, Call(seed, call)) for r in range(n)]
    algorithms = [c.run(gradients[r], outs[r]) for r, c in enumerate(collectives)]
    with torch.no_grad():
        lockstep(algorithms, meters)
    sent = tuple(meter.bytes_sent for meter in meters)
    headers = sum(HEADER_BYTES * len(schedule.peers(r)) for r in range(n))
    volume = n * collectives[0].volume
    bits = 8 * (sum(sent) - headers) / volume if volume else 0.0
    return ErrorReport(vnmse(outs[0], gradients.double().sum(0)), bits, sent, outs[0])
