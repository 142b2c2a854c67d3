"""How DDP fills its buckets: which gradients travel together, and when they may begin to."""

from dataclasses import dataclass

from dynamiq.planner.profiles.workload import WorkloadProfile

ENTRY_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MIB = 1 << 20
_DEFAULT_CAPS = (1 * _MIB, 25 * _MIB)
"""Of DDP without bucket_cap_mb: the first bucket's, and all others'."""
_APART = 4
"""Of so many buckets at the end each is looked at by itself, of as many before them every two."""
_LEADING_BITS = 5


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel as one tensor.

    Attributes:
        numel: Entries.
        ready_s: When the last of them is ready, from the beginning of the backward pass.
        times: How many such buckets this one stands for, one after the other.
    """

    numel: int
    ready_s: float
    times: int = 1


def fill(workload: WorkloadProfile, bucket_cap_mb: int | None) -> list[Bucket]:
    """Return the buckets of a step after the first one, when DDP knows the order of gradients.

    A bucket is closed when it has reached the cap, and may exceed it by its last gradient; buckets
    start in their order, so none before the one that is filled earlier.

    Args:
        workload: Gradients in the order in which they are ready.
        bucket_cap_mb: As DDP's argument, in MiB; None is DDP's default, where the first bucket has
            1 MiB and others 25.
    """
    caps = _DEFAULT_CAPS if bucket_cap_mb is None else (bucket_cap_mb * _MIB,) * 2
    size = ENTRY_BYTES[workload.dtype]
    buckets: list[Bucket] = []
    numel, ready_s = 0, 0.0
    for gradient in workload.gradients:
        numel, ready_s = numel + gradient.numel, max(ready_s, gradient.ready_s)
        if numel * size >= caps[min(len(buckets), 1)]:
            buckets.append(Bucket(numel, ready_s))
            numel = 0
    if numel:
        buckets.append(Bucket(numel, ready_s))
    return buckets


def thinned(buckets: list[Bucket], *, rounded: bool = False) -> list[Bucket]:
    """Let one bucket stand for several that follow each other, the more the earlier they are.

    What is long over when the last buckets begin need not be known in detail. Those that stand for
    several have their mean size, to 3 %, so that few sizes are different.

    Args:
        buckets: In their order.
        rounded: Whether all sizes are to 3 %.
    """
    groups: list[list[Bucket]] = []
    most, left = 1, _APART
    for bucket in reversed(buckets):
        if groups and len(groups[-1]) < most:
            groups[-1].append(bucket)
            continue
        if not left:
            most, left = 2 * most, _APART
        groups.append([bucket])
        left -= 1
    return [
        group[0] if len(group) == 1 and not rounded else _together(group)
        for group in reversed(groups)
    ]


def _together(group: list[Bucket]) -> Bucket:
    mean = round(sum(b.numel for b in group) / len(group))
    grain = 1 << max(0, mean.bit_length() - _LEADING_BITS)
    numel = max(1, round(mean / grain)) * grain
    return Bucket(numel, max(b.ready_s for b in group), len(group))
