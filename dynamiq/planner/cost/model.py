"""How long a training step takes with a configuration, and where its time goes."""

from pydantic import Field

from dynamiq.compressors import Uncompressed
from dynamiq.compressors.uncompressed import Format
from dynamiq.core.compressor import Compressor
from dynamiq.core.description import Value
from dynamiq.core.registry import AnyCompressor, AnyTopology
from dynamiq.core.segments import segment_count
from dynamiq.core.topology import Schedule
from dynamiq.planner.cost.buckets import ENTRY_BYTES, Bucket, fill, thinned
from dynamiq.planner.cost.clock import Job, run
from dynamiq.planner.cost.links import delay
from dynamiq.planner.cost.program import Block, Clockwork
from dynamiq.planner.cost.stages import Request
from dynamiq.planner.profiles.hardware import (
    CodecCost,
    HardwareProfile,
    Link,
    NotNegative,
    OperationCost,
    Processor,
)
from dynamiq.planner.profiles.workload import WorkloadProfile

MIN_NUMEL = 65_536
"""Buckets with fewer entries travel uncompressed, as in a pipeline by default."""
WIRE_FORMATS: dict[str, Format] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""What gradients of a dtype travel as when they are not compressed."""
MANY = 1024
"""Ranks from which on less is looked at, so that a plan takes seconds."""
_BLOCKS = 2000
"""About so many blocks a step is looked at in, and no fewer rounds of a pass than the least."""
_LEAST_ROUNDS, _MOST_ROUNDS = 6, 64
_BOUNDLESS = 1e30


class Configuration(Value):
    """What a plan chooses.

    Attributes:
        compressor: The wire format.
        topology: Who sends what to whom.
        bucket_cap_mb: DDP's argument, in MiB; None for its default.
        segments: Of each chunk; None chooses by the size of the bucket, as pipelines do.
        min_numel: Buckets with fewer entries travel uncompressed.
    """

    compressor: AnyCompressor
    topology: AnyTopology
    bucket_cap_mb: int | None = Field(default=None, ge=1)
    segments: int | None = Field(default=None, ge=1)
    min_numel: int = Field(default=MIN_NUMEL, ge=0)


class StepTime(Value):
    """A predicted step.

    Attributes:
        step_s: All of it.
        compute_s: What a step without communication takes.
        exposed_s: What communication adds.
        alone_s: The backward pass of a step without communication.
        backward_s: The backward pass, slowed down by encoding if they share processors.
        codec_s: How long the thread that encodes was busy.
        wire_s: How long the busiest link was.
    """

    step_s: NotNegative
    compute_s: NotNegative
    exposed_s: NotNegative
    alone_s: NotNegative
    backward_s: NotNegative
    codec_s: NotNegative
    wire_s: NotNegative


def predict(
    hardware: HardwareProfile, workload: WorkloadProfile, configuration: Configuration
) -> StepTime:
    """Return what a step of DDP takes in the long run, with a pipeline's hook.

    Raises:
        ConfigurationError: The topology does not fit the number of ranks, the compressor cannot
            sum so many, sizes depend on the data, or the profile lacks the format's costs.
    """
    return Model(hardware, workload).predict(configuration)


class Model:
    """Predictions for one profile and one workload, which share what they have in common."""

    def __init__(self, hardware: HardwareProfile, workload: WorkloadProfile) -> None:
        """Remember both."""
        self.hardware = hardware
        self.workload = workload
        self._schedules: dict[str, Schedule] = {}
        self._blocks: dict[tuple[object, ...], list[Block]] = {}
        self._filled: dict[int | None, list[Bucket]] = {}

    def predict(self, configuration: Configuration) -> StepTime:
        """See :func:`predict`."""
        many = self.hardware.world_size >= MANY
        few = thinned(self._buckets(configuration), rounded=many)
        jobs = [Job(b.ready_s, self._blocks_of(b, configuration, len(few)), b.times) for b in few]
        backward_s = self.workload.backward_s
        share = share_of(self.hardware.processor)
        elapsed = run(jobs, backward_s, share, self.hardware.channels)
        exposed_s = elapsed.end_s - backward_s
        return StepTime(
            step_s=self.workload.step_s + exposed_s,
            compute_s=self.workload.step_s,
            exposed_s=exposed_s,
            alone_s=backward_s,
            backward_s=elapsed.backward_s,
            codec_s=elapsed.worked_s,
            wire_s=elapsed.sending_s,
        )

    def bytes_sent(self, configuration: Configuration, rank: int = 0) -> int:
        """Return what a rank sends in a step in which nothing is known from earlier ones."""
        buckets = self._buckets(configuration)
        by_size: dict[int, int] = {}
        for numel in {b.numel for b in buckets}:
            request = self._request(numel, configuration, rank)
            by_size[numel] = request.shape().bytes_sent(self._segments(numel, configuration))
        return sum(by_size[b.numel] for b in buckets)

    def _buckets(self, configuration: Configuration) -> list[Bucket]:
        cap = configuration.bucket_cap_mb
        if cap not in self._filled:
            self._filled[cap] = fill(self.workload, cap)
        return self._filled[cap]

    def _blocks_of(self, bucket: Bucket, configuration: Configuration, buckets: int) -> list[Block]:
        request = self._request(bucket.numel, configuration, 0)
        segments = self._segments(bucket.numel, configuration)
        passes = 2 + 2 * segments
        most = min(max(_BLOCKS // (buckets * passes), _LEAST_ROUNDS), _MOST_ROUNDS)
        key = (request.compressor.digest(), id(request.schedule), bucket.numel, segments, most)
        if key not in self._blocks:
            clockwork = Clockwork(self.hardware, most)
            self._blocks[key] = clockwork.blocks(request.shape(), segments)
        return self._blocks[key]

    def _request(self, numel: int, configuration: Configuration, rank: int) -> Request:
        compressor: Compressor = configuration.compressor
        plain = numel < configuration.min_numel and compressor.kind != "uncompressed"
        if plain:
            compressor = Uncompressed(WIRE_FORMATS[self.workload.dtype])
        entry_bytes = ENTRY_BYTES[self.workload.dtype]
        schedule = self._schedule(configuration)
        return Request(compressor, schedule, numel, entry_bytes, rank, plain)

    def _segments(self, numel: int, configuration: Configuration) -> int:
        on_cpu = self.hardware.processor.device == "cpu"
        schedule = self._schedule(configuration)
        return configuration.segments or segment_count(schedule, numel, on_cpu=on_cpu)

    def _schedule(self, configuration: Configuration) -> Schedule:
        topology = configuration.topology
        name = topology.digest().hex()
        if name not in self._schedules:
            self._schedules[name] = topology.schedule(self.hardware.world_size)
        schedule = self._schedules[name]
        configuration.compressor.check_world_size(schedule.compressed_ranks)
        return schedule


def share_of(processor: Processor) -> float:
    """Return how fast the backward pass and encoding go beside each other, relative to alone.

    On a GPU, kernels of both share one device. On a CPU each wants one processor of the rank's.
    """
    if processor.device == "cuda":
        return 0.5
    cores = processor.cores_per_rank
    if cores is None:
        return 1.0
    return min(1.0, cores / 2) / min(1.0, cores)


def without_bytes(hardware: HardwareProfile, compressor: Compressor) -> HardwareProfile:
    """Return a profile on which bytes and a format cost no time: what is left is latency."""

    def faster(link: Link) -> Link:
        least_s = min([delay(link, m.message_bytes) for m in link.measured] or [link.latency_s])
        return Link(latency_s=least_s, bandwidth_bytes_per_s=_BOUNDLESS)

    free = OperationCost(fixed_s=0.0, entry_s=0.0)
    operations = [name for name in CodecCost.model_fields if name != "compressor"]
    codec = CodecCost(compressor=compressor, **dict.fromkeys(operations, free))
    processor = hardware.processor.model_copy(update={"codecs": (codec,), "byte_s": 0.0})
    node = None if hardware.node is None else faster(hardware.node)
    return hardware.model_copy(
        update={"network": faster(hardware.network), "node": node, "processor": processor}
    )
