"""Clusters and trainings of round numbers, whose steps can be worked out by hand."""

from collections.abc import Sequence

from dynamiq import DynamiQCompressor, MXCompressor, Uncompressed
from dynamiq.core.compressor import Compressor
from dynamiq.planner.profiles.hardware import (
    CodecCost,
    HardwareProfile,
    Link,
    OperationCost,
    Processor,
)
from dynamiq.planner.profiles.workload import Gradient, WorkloadProfile

OPERATIONS = [name for name in CodecCost.model_fields if name != "compressor"]
FORMATS = (
    Uncompressed("fp32"),
    Uncompressed("bf16"),
    MXCompressor(),
    DynamiQCompressor(3.0),
    DynamiQCompressor(8.0),
)


def costs(compressor: Compressor, fixed_s: float = 0.0, entry_s: float = 0.0, **own) -> CodecCost:
    """Return the same cost for all operations but for those that are named."""
    operations = {name: own.get(name, (fixed_s, entry_s)) for name in OPERATIONS}
    return CodecCost(
        compressor=compressor,
        **{name: OperationCost(fixed_s=f, entry_s=e) for name, (f, e) in operations.items()},
    )


def cluster(
    ranks: int,
    *,
    latency_s: float = 0.0,
    bytes_per_s: float = 1e9,
    cores: float | None = None,
    codecs: Sequence[CodecCost] | None = None,
    **fields,
) -> HardwareProfile:
    """Return ranks on machines of their own, where formats cost nothing if nobody says."""
    if codecs is None:
        codecs = [costs(compressor) for compressor in FORMATS]
    processor = Processor(device="cpu", cores_per_rank=cores, codecs=tuple(codecs))
    values = {
        "name": "test",
        "source": "tests",
        "world_size": ranks,
        "network": Link(latency_s=latency_s, bandwidth_bytes_per_s=bytes_per_s),
        "processor": processor,
        **fields,
    }
    return HardwareProfile(**values)


def training(
    *gradients: tuple[int, float], backward_s: float = 1.0, step_s: float | None = None, **fields
) -> WorkloadProfile:
    """Return a training with gradients of so many entries, ready at such times."""
    found = tuple(Gradient(numel=numel, ready_s=ready_s) for numel, ready_s in gradients)
    values = {"name": "test", "source": "tests", "backward_s": backward_s, **fields}
    step_s = 1.5 * backward_s if step_s is None else step_s
    return WorkloadProfile(step_s=step_s, gradients=found, **values)
