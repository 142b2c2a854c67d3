"""What a run of the benchmark is, and what it has found.

Units are in the names: ``_s`` seconds, ``_bytes`` bytes, ``_mbit`` 10⁶ bits per second.
"""

from statistics import median
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, model_validator

from dynamiq.core.registry import AnyCompressor, AnyTopology
from evaluation.records import DistributedPlan, Record
from evaluation.rows import RunRow

SpanKind = Literal["codec", "wait", "transfer"]
Today = Literal["fp32", "bf16", "fp16", "powersgd", "none"]
_TODAY: dict[Today, str] = {
    "fp32": "Gloo FP32",
    "bf16": "Gloo BF16",
    "fp16": "Gloo FP16",
    "powersgd": "PowerSGD",
    "none": "no communication",
}


class Existing(Record):
    """What users of torch have today.

    Attributes:
        name: "fp32", "bf16", "fp16" (Gloo's all-reduce of the entries in that format; in training
            torch's hooks); only in training also "powersgd" and "none", which does not
            communicate, so that ranks compute for themselves.
    """

    kind: Literal["existing"] = "existing"
    name: Today

    @property
    def label(self) -> str:
        """What tables call it."""
        return _TODAY[self.name]


class Ours(Record):
    """A pipeline.

    Attributes:
        name: what tables call the compressor.
        segments: parts of each chunk that overlap; ``None`` leaves them to the pipeline.
    """

    kind: Literal["ours"] = "ours"
    name: str
    compressor: AnyCompressor
    topology: AnyTopology
    segments: Annotated[int, Field(ge=1)] | None = None

    @property
    def label(self) -> str:
        """What tables call it."""
        parts = "" if self.segments is None else f", {self.segments} segments"
        return f"{self.name}, {self.topology.kind}{parts.removesuffix('s' * (self.segments == 1))}"


Method = Annotated[Existing | Ours, Field(discriminator="kind")]


class Task(DistributedPlan):
    """What all runs are decided by.

    Attributes:
        world_size: number of hosts.
        rate_mbit: line rate of every host.
        flows: TCP connections per host, to the next one, that send all they can meanwhile.
        methods: measured in turn.
        rounds: how many times.
        seed: of the tensors' or models' contents, and of rounding.
    """

    rate_mbit: float
    flows: Annotated[int, Field(ge=0)] = 0
    methods: Annotated[tuple[Method, ...], Field(min_length=1)]
    rounds: Annotated[int, Field(ge=1)]
    seed: int = 0

    @model_validator(mode="after")
    def _methods_differ(self) -> Self:
        labels = [method.label for method in self.methods]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"a method is named twice: {', '.join(twice)}")
        return self


class AllReduceTask(Task):
    """All-reduces (sums) of one tensor.

    Attributes:
        tensor_bytes: of its float32 entries.
    """

    task: Literal["all_reduce"] = "all_reduce"
    tensor_bytes: Annotated[int, Field(ge=4, multiple_of=4)]

    @model_validator(mode="after")
    def _collectives_only(self) -> Self:
        for method in self.methods:
            if isinstance(method, Existing) and method.name in ("powersgd", "none"):
                raise ValueError(f"{method.label} is no all-reduce; it is measured in training")
        return self


class TrainingTask(Task):
    """Training steps with DDP.

    Attributes:
        workload: name in ``evaluation.bench.workloads``.
        bucket_mib: most that DDP puts into a bucket, in MiB; ``None`` for its own choice, 25 after
            a first one of 1. PowerSGD has one bucket in any case.
        steps: timed in each round, after some that are not.
    """

    task: Literal["training"] = "training"
    workload: str
    bucket_mib: Annotated[float, Field(gt=0)] | None = None
    steps: Annotated[int, Field(ge=1)]


BenchTask = Annotated[AllReduceTask | TrainingTask, Field(discriminator="task")]


class TraceTask(DistributedPlan):
    """All-reduces of which one is drawn.

    Attributes:
        rate_mbit: line rate of every host.
        flows: competing connections per host.
        method: what to trace.
        tensor_bytes: of float32 entries.
        calls: how many are traced; the one that takes a middling time is kept.
    """

    task: Literal["trace"] = "trace"
    rate_mbit: float
    flows: Annotated[int, Field(ge=0)] = 0
    method: Ours
    tensor_bytes: Annotated[int, Field(ge=4, multiple_of=4)]
    calls: Annotated[int, Field(ge=1)] = 3
    seed: int = 0


AnyTask = Annotated[AllReduceTask | TrainingTask | TraceTask, Field(discriminator="task")]


class Measured(Record):
    """What one method took.

    Attributes:
        times_s: of each call or step, on the rank that took longest.
        sent_bytes: of each rank per call or step, seen by its network interface: payloads, and
            what else the connections needed.
        codec_s: statistics, encoding and accumulation, the mean rank's per call or step; ``None``
            if it is no pipeline of ours. The same for the next.
        wire_s: waiting for bytes.
        cpu_s: processor time of all ranks together per call or step.
        compressed: whether a pipeline of ours used its compressor, which it does not for small
            tensors.
        vnmse: squared error of one all-reduce against Gloo's FP32, over its squared norm; ``None``
            in training and where that is not among the methods.
    """

    method: Method
    times_s: tuple[float, ...]
    sent_bytes: tuple[float, ...]
    codec_s: float | None
    wire_s: float | None
    cpu_s: float
    compressed: bool | None
    vnmse: float | None = None

    @property
    def label(self) -> str:
        """What tables call it."""
        return f"{self.method.label}{' (too small: uncompressed)' * (self.compressed is False)}"

    @property
    def median_s(self) -> float:
        """The time that stands for the method."""
        return median(self.times_s)

    @property
    def cores(self) -> float:
        """Processors that all ranks together kept busy, on average."""
        return self.cpu_s * len(self.times_s) / sum(self.times_s)

    def link_share(self, rate_mbit: float) -> float:
        """Return how much of the time the line rate explains.

        That is the time which the rank that sends most would take to send its bytes at line rate,
        over the median time.
        """
        return max(self.sent_bytes) * 8 / (rate_mbit * 1e6) / self.median_s


class Warm(Record):
    """Everything was done once; the clock starts when the launcher lets it."""

    kind: Literal["warm"] = "warm"


class Findings(Record):
    """What the ranks have found, in the order of the methods."""

    kind: Literal["findings"] = "findings"
    measured: tuple[Measured, ...]


class BenchRow(RunRow):
    """One finished run.

    Attributes:
        command: what did it.
        link_mbit: TCP payload rate between two idle hosts before the run.
        machine_cores: processors of the whole machine that were busy during the run, on average,
            with all that ran beside it.
        environment: versions and machine.
        commit: of the code.
    """

    settings: BenchTask
    command: str
    measured: tuple[Measured, ...]
    link_mbit: float
    machine_cores: float
    environment: dict[str, Any]
    commit: str

    def find(self, name: Today) -> Measured | None:
        """Return what an existing method took, if it was part of the run."""
        for measured in self.measured:
            if isinstance(measured.method, Existing) and measured.method.name == name:
                return measured
        return None


class Span(Record):
    """Something that took time in a rank's process.

    Attributes:
        kind: "codec" (the processor works on entries), "wait" (a thread is blocked until bytes
            have come and gone) or "transfer" (from the post to the end of that wait: bytes may be
            on the wire).
        name: the operation; of waits and transfers, which step of which exchange.
        thread: where it happened.
        began_s: on the machine's clock, which all ranks share. The same for the next.
        cpu_began_s: on the clock of the thread's processor time: a thread that wants to run and may
            not is told from one that runs. The same for the next; 0 for transfers.
        sent_bytes: of a transfer. The same for the next.
        hop: of the message that an operation reads or, if it reads none, writes.
        positions: first and last + 1 of the segment that an operation works on.
    """

    kind: SpanKind
    name: str
    thread: str
    began_s: float
    ended_s: float
    cpu_began_s: float = 0.0
    cpu_ended_s: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    hop: int | None = None
    positions: tuple[int, int] | None = None


class Traced(Record):
    """One call: the spans of each rank, and when it began and ended there."""

    kind: Literal["traced"] = "traced"
    spans: tuple[tuple[Span, ...], ...]
    began_s: tuple[float, ...]
    ended_s: tuple[float, ...]


Answer = Warm | Findings | Traced
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Annotated[Answer, Field(discriminator="kind")])


def read_answer(line: str) -> Answer:
    """Return what a worker wrote on one line."""
    return _ANSWER.validate_json(line)
