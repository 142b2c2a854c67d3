"""What the ranks run on: links, processors, and how fast formats are there."""

from typing import Annotated, Literal

from pydantic import Field

from dynamiq.core.description import Value
from dynamiq.core.registry import AnyCompressor

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]


class MessageTime(Value):
    """How long one exchange took: all ranks send a message of this size and await another.

    Attributes:
        message_bytes: Size.
        time_s: From the post to the end of the wait.
    """

    message_bytes: Annotated[int, Field(ge=1)]
    time_s: Positive


class Link(Value):
    """What carries the messages of a group of ranks; full duplex.

    Attributes:
        latency_s: Of a message of a few bytes, posted on both sides at once.
        bandwidth_bytes_per_s: Of a large one, in each direction, while all ranks send.
        measured: Times of single exchanges by size, if there are any, ascending in size.
    """

    latency_s: NotNegative
    bandwidth_bytes_per_s: Positive
    measured: tuple[MessageTime, ...] = ()


class OperationCost(Value):
    """What one operation of an encoding costs a rank when all ranks of the machine do it at once.

    Attributes:
        fixed_s: Each time, however few the entries.
        entry_s: For each entry of the tensor that it works on.
    """

    fixed_s: NotNegative
    entry_s: NotNegative


class CodecCost(Value):
    """What a format's operations cost.

    Attributes:
        compressor: The format, its bit budget included.
        statistics: Of all entries of a bucket, before the statistics are sent.
        statistics_message: Of one message of the round in which they are sent, on average over
            compressing and accumulating; for each of its statistics, not for each entry.
        encode: Decisions, load and store: once per bucket.
        compress: Of the entries of one message.
        accumulate: decompress_accumulate of the entries of one message.
        recompress: decompress_accumulate_recompress of the entries of one message.
        decompress: Of the entries of one message.
        next_state: Once per bucket.
    """

    compressor: AnyCompressor
    statistics: OperationCost
    statistics_message: OperationCost
    encode: OperationCost
    compress: OperationCost
    accumulate: OperationCost
    recompress: OperationCost
    decompress: OperationCost
    next_state: OperationCost


class Processor(Value):
    """What compresses.

    Attributes:
        device: "cpu" or "cuda".
        name: As the system gives it.
        cores_per_rank: Processors that a rank has for itself, on the CPU. Below 2, encoding slows
            the backward pass that goes on meanwhile, and below 1 ranks slow each other, which
            measured costs contain already.
        memory_bytes_per_s: Of the device's memory: what formats without a measured cost are
            estimated by, through the bytes that they move.
        message_s: Processor time in which the thread that encodes posts a message, awaits it and
            takes it up.
        byte_s: Processor time of the whole process per byte of a large exchange, which is sent and
            received at once.
        codecs: Measured costs.
    """

    device: Literal["cpu", "cuda"]
    name: str = ""
    cores_per_rank: Positive | None = None
    memory_bytes_per_s: Positive | None = None
    message_s: NotNegative = 0.0
    byte_s: NotNegative = 0.0
    codecs: tuple[CodecCost, ...] = ()


class HardwareProfile(Value):
    """What the ranks run on.

    Attributes:
        version: Of this format; a profile of another one is refused.
        name: For people.
        source: Where the figures come from: a command or a document.
        world_size: Ranks.
        ranks_per_node: How many of them share a machine, whose network link they share, too.
        channels: Calls that may be in flight at once.
        network: Between machines, for all ranks of a machine together.
        node: Inside a machine, for each rank; None where a machine has one rank.
        processor: What each rank has.
    """

    version: Literal[1] = 1
    name: str
    source: str
    world_size: Annotated[int, Field(ge=1)]
    ranks_per_node: Annotated[int, Field(ge=1)] = 1
    channels: Annotated[int, Field(ge=1)] = 4
    network: Link
    node: Link | None = None
    processor: Processor
