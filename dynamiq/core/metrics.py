"""How good and how large: vNMSE, bits per entry, and a simulated call that measures both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.core.agreement import HEADER_BYTES
from dynamiq.core.collective import Collective
from dynamiq.core.compressor import Compressor, State
from dynamiq.core.drivers import Meter, lockstep
from dynamiq.core.errors import InputError
from dynamiq.core.hierarchy import on_levels
from dynamiq.core.message import Call
from dynamiq.core.topology import Topology


@dataclass(frozen=True)
class ErrorReport:
    """What :func:`measure_error` found.

    Attributes:
        vnmse: ‖x̂ - x‖² / ‖x‖², x̂ the all-reduced sum, x the exact one (DynamiQ §2).
        bits_per_entry: Mean over ranks of bits sent per padded entry per pass; everything counted
            but the 16-byte header, two passes of (n - 1)/n of the bucket. With ``Hierarchical``
            only what is sent between nodes counts, bits and entries.
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


@dataclass(frozen=True)
class Simulated:
    """What a call left behind on all ranks.

    Attributes:
        result: float32[d], the all-reduced sum or mean, the same bits on all ranks.
        states: Next state of each rank.
        bytes_sent: Bytes sent by each rank, headers included.
        bits_per_entry: As in :class:`ErrorReport`.
    """

    result: Tensor
    states: list[State]
    bytes_sent: tuple[int, ...]
    bits_per_entry: float


def simulate(
    gradients: Tensor,
    compressor: Compressor,
    topology: Topology,
    call: Call,
    states: Sequence[State] | None = None,
) -> Simulated:
    """All-reduce the rows of float[n, d] in this thread, with the very code of a real call.

    Args:
        gradients: float32, bfloat16 or float16 [n, d], row i the entries of rank i.
        compressor: The wire format.
        topology: Who sends what to whom.
        call: Seed, number and divisor.
        states: Of each rank, from the call before; none for a first call.

    Raises:
        InputError: ``gradients`` is not a floating-point matrix, or another argument not what it
            should be.
    """
    if not isinstance(gradients, Tensor):
        raise InputError(
            f"a simulation takes a floating-point tensor [ranks, entries], got a "
            f"{type(gradients).__name__}"
        )
    is_matrix = gradients.dim() == 2 and gradients.layout == torch.strided
    if not is_matrix or not gradients.is_floating_point():
        raise InputError(
            f"a simulation takes a floating-point tensor [ranks, entries], got "
            f"{gradients.dtype}{list(gradients.shape)}, {gradients.layout}"
        )
    for value, kind in ((compressor, Compressor), (topology, Topology)):
        if not isinstance(value, kind):
            raise InputError(f"a simulation takes a {kind.__name__}, got {value!r}")
    n, d = gradients.shape
    schedule = topology.schedule(n)
    meters = [Meter() for _ in range(n)]
    outs = [torch.empty(d, dtype=torch.float32) for _ in range(n)]
    before = states or [State()] * n
    collectives = [
        on_levels(Collective(compressor, schedule, rank, d, call, state=before[rank]))
        for rank in range(n)
    ]
    algorithms = [c.run(gradients[r], outs[r]) for r, c in enumerate(collectives)]
    with torch.no_grad():
        after = lockstep(algorithms, meters)
    sent = tuple(meter.bytes_sent for meter in meters)
    far = sum(meter.bytes_sent - meter.node_bytes_sent for meter in meters)
    headers = sum(HEADER_BYTES * len(c.network_peers) for c in collectives)
    volume = math.fsum(c.volume for c in collectives)
    bits = 8 * (far - headers) / volume if volume else 0.0
    return Simulated(outs[0], after, sent, bits)


def measure_error(
    gradients: Tensor,
    compressor: Compressor,
    topology: Topology,
    *,
    seed: int = 0,
    call: int = 0,
    warm_up_calls: int = 0,
) -> ErrorReport:
    """All-reduce the rows of float[n, d] in this thread and compare with the exact sum.

    The simulation runs the very code of a real call, so its bytes and bits are those of a run.

    Args:
        gradients: float32, bfloat16 or float16 [n, d], row i the entries of rank i.
        compressor: The wire format.
        topology: Who sends what to whom.
        seed: Seed of the pipeline.
        call: Number of the first call; with the seed it fixes all randomness.
        warm_up_calls: Calls with the same gradients before the one that is measured: formats that
            learn from call to call are as good as in a training run after two.

    Raises:
        InputError: ``gradients`` is not a floating-point matrix.
    """
    states = None
    for number in range(call, call + warm_up_calls):
        states = simulate(gradients, compressor, topology, Call(seed, number), states).states
    last = simulate(gradients, compressor, topology, Call(seed, call + warm_up_calls), states)
    error = vnmse(last.result, gradients.double().sum(0))
    return ErrorReport(error, last.bits_per_entry, last.bytes_sent, last.result)
