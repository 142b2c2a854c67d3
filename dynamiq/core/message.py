"""What addresses everything: one call of a pipeline, and one chunk on one link of it.

Sender and receiver can both write a message down without exchanging it, so widths (``hop``),
private randomness (``sender``) and the integer width of a homomorphic sum (``summed``) need no
bytes on the wire.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Message:
    """One chunk on one link.

    Attributes:
        chunk: Index of the chunk, 0 to world_size - 1; rank r finally owns chunk r.
        sender: The rank that *compressed* the payload. In the all-gather that is the chunk's
            owner, however often the payload is forwarded.
        summed: How many ranks' entries the payload sums.
        hop: Index into ``Schedule.hops``.
    """

    chunk: int
    sender: int
    summed: int
    hop: int


@dataclass(frozen=True, slots=True)
class Call:
    """One collective of one pipeline.

    Attributes:
        seed: The pipeline's seed, equal on all ranks.
        number: Counts the pipeline's collectives from 0, so that two buckets never share
            randomness.
        divisor: What the sum is divided by at the end: 1 for "sum", world_size for "mean".
        gather: Whether an all-gather follows the reduce-scatter.
    """

    seed: int = 0
    number: int = 0
    divisor: int = 1
    gather: bool = True
