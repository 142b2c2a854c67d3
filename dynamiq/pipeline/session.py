"""A pipeline at work: its group, its call counter, the states of its tensors."""

import json
from dataclasses import replace

import torch
from torch import Tensor

from dynamiq.core.agreement import check_hellos
from dynamiq.core.buffers import Buffers
from dynamiq.core.collective import Algorithm, Collective
from dynamiq.core.compressor import Compressor, State
from dynamiq.core.errors import InputError, NonFiniteError, TransportError
from dynamiq.core.hierarchy import on_levels
from dynamiq.core.message import Call
from dynamiq.core.registry import compressor_registry
from dynamiq.core.segments import segment_count
from dynamiq.core.topology import Schedule
from dynamiq.core.transport import Transport
from dynamiq.pipeline.capture import Capture, Observation
from dynamiq.pipeline.executor import Executor
from dynamiq.pipeline.handle import Handle
from dynamiq.pipeline.ledger import Ledger
from dynamiq.pipeline.request import Request
from dynamiq.pipeline.settings import Settings
from dynamiq.pipeline.streams import Fence
from dynamiq.pipeline.verification import Verification

_FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Session:
    """Turns requests into collectives, in the order in which they are started.

    Not thread-safe by itself: its pipeline lets one caller in at a time.
    """

    def __init__(self, settings: Settings, transport: Transport) -> None:
        """Prepare; nothing is started or connected."""
        self.settings = settings
        self.transport = transport
        self.executor = Executor(transport)
        self.ledger = Ledger()
        self.capture = Capture(settings.capture)
        self._schedule: Schedule | None = None
        self._calls = 0
        self._verifiable = 0
        self._states: dict[str, State] = {}
        self._extents: dict[str, str] = {}
        self._buffers = Buffers()

    def connect(self) -> Schedule:
        """Join the group once; check that all ranks have the same settings, and not too many.

        Raises:
            AgreementError: Settings differ.
            ConfigurationError: The compressor cannot sum so many ranks, or the topology does not
                fit their number.
        """
        self.executor.check_open()
        if self._schedule is None:
            # A transport that cannot be joined decides itself whether it may be tried again.
            hellos = self.transport.connect(json.dumps(self.settings.to_dict()).encode())
            try:
                check_hellos(hellos)
                schedule = self.settings.topology.schedule(self.transport.world_size)
                self.settings.compressor.check_world_size(schedule.compressed_ranks)
                self._schedule = schedule
            except BaseException as error:
                self.executor.fail(error)
                raise
        return self._schedule

    def start(self, request: Request, *, background: bool) -> Handle:
        """Start a checked request.

        Raises:
            InputError: The compressor depends on state and the request has no key, or one under
                which it keeps what belongs to other entries.
        """
        schedule = self.connect()
        if background and request.tensor.is_inference():
            raise InputError(
                "an inference tensor cannot be written by the thread that runs asynchronous calls; "
                "use async_op=False, or torch.no_grad() instead of inference_mode()"
            )
        skip = self._skip_reason(request)
        compressor = (
            self.settings.compressor if skip is None else _uncompressed(request.tensor.dtype)
        )
        if compressor.needs_key and request.key is None:
            raise InputError(
                f"{compressor.kind} carries state from call to call; name the tensor with key=..., "
                f"so that its state is not mixed with another tensor's"
            )
        if compressor.fixes_numel and request.key is not None:
            self._check_extent(request.key, request, schedule)
        collective = self._collective(request, compressor, schedule)
        verification = self._verification(request, schedule) if skip is None else None
        observation = None
        if self.capture.due(request):
            observation = Observation(request, collective.call.divisor)
        key = request.key if compressor.stateful else None
        if verification is not None or observation is not None:
            # The same key makes what looks at the call wait for it.
            key = key or f"call {collective.call.number}"
        handle = self.executor.run(
            self._reduce(
                request,
                collective,
                (verification, observation),
                self._alarm(request, schedule),
                Fence(request.tensor),
            ),
            collective.call.number,
            key,
            lambda _, meter: self.ledger.record(meter, collective.volume, skip),
            background=background,
        )
        if verification is not None:
            verification.start(self.executor, self.ledger, key, background=background)
        if observation is not None:
            self._observe(observation, request, schedule, key, background=background)
        return handle

    def check_connected(self) -> None:
        """Raise TransportError before :meth:`connect`."""
        if self._schedule is None:
            raise TransportError("the pipeline is not connected yet; call connect() first")

    def abort(self, error: BaseException) -> None:
        """End calls in flight with an error."""
        if self._schedule is not None:
            self.executor.abort(error)

    def close(self) -> None:
        """Wait for calls in flight, then leave the group; idempotent."""
        self.executor.close()
        if self._schedule is not None:  # or else it may be another pipeline's
            self.transport.close()

    def _check_extent(self, key: str, request: Request, schedule: Schedule) -> None:
        extent = f"{request.tensor.numel()} entries"
        if 1 < schedule.compressed_ranks < schedule.world_size and request.bounds is not None:
            # What a rank keeps belongs to the entries of its column, which the slices decide.
            extent += f" in slices {list(request.bounds)}"
        known = self._extents.setdefault(key, extent)
        if extent != known:
            raise InputError(
                f"a tensor of {extent} came with the key {key!r}, under which "
                f"{self.settings.compressor.kind} keeps what belongs to {known}; give "
                f"tensors of different sizes different keys, and on two levels those that are "
                f"sliced in different ways, too"
            )

    def _skip_reason(self, request: Request) -> str | None:
        """Return why a request travels uncompressed; the same on all ranks."""
        if request.skip is not None:
            return request.skip
        if request.tensor.dtype is torch.float64 and not self.settings.compress_float64:
            return "float64"
        if self.settings.compresses and request.tensor.numel() < self.settings.min_numel:
            return "small"
        return None

    def _collective(
        self, request: Request, compressor: Compressor, schedule: Schedule
    ) -> Collective:
        number, self._calls = self._calls, self._calls + 1
        divisor = schedule.world_size if request.op == "mean" else 1
        gather = request.output is None
        tensor = request.tensor
        count = segment_count(schedule, tensor.numel(), on_cpu=tensor.is_cpu)
        segments = self.settings.segments or count
        collective = Collective(
            compressor,
            schedule,
            self.transport.rank,
            tensor.numel(),
            Call(self.settings.seed, number, divisor, gather),
            name=f"call {number} ({request.name})",
            description=f"{request.description}, as {compressor.kind}, in {segments} segments",
            bounds=request.bounds,
            segments=segments,
            buffers=self._buffers,
        )
        return on_levels(collective, plain=compressor is not self.settings.compressor)

    def _verification(self, request: Request, schedule: Schedule) -> Verification | None:
        every = self.settings.verify_every
        self._verifiable += 1
        if every is None or self._verifiable % every:
            return None
        exact = replace(request, name=f"verification of {request.name}")
        return Verification(
            request, self._collective(exact, _uncompressed(torch.float64), schedule)
        )

    def _observe(
        self,
        observation: Observation,
        request: Request,
        schedule: Schedule,
        key: str | None,
        *,
        background: bool,
    ) -> None:
        name = f"capture of {request.name}"
        small = Request("all_reduce", observation.summary, None, "sum", None, name)
        collective = self._collective(small, _uncompressed(torch.float64), schedule)
        records = self.capture, self.ledger
        observation.start(collective, self.executor, records, key, background=background)

    def _alarm(self, request: Request, schedule: Schedule) -> Collective | None:
        """Return the one-entry collective that tells all ranks of a non-finite result."""
        if self.settings.on_nonfinite == "propagate":
            return None
        bad = torch.empty(1, dtype=torch.float32, device=request.tensor.device)
        name = f"whether {request.name} is finite"
        small = Request("all_reduce", bad, None, "sum", None, name)
        return self._collective(small, _uncompressed(torch.float32), schedule)

    def _reduce(
        self,
        request: Request,
        collective: Collective,
        observers: tuple[Verification | None, Observation | None],
        alarm: Collective | None,
        fence: Fence,
    ) -> Algorithm[Tensor | NonFiniteError]:
        fence.enter()
        verification, observation = observers
        key = request.key if collective.compressor.stateful else None
        if key is not None:
            # Read now, not when the request was made: an earlier call may have been in flight.
            collective = replace(collective, state=self._states.get(key, State()))
        if verification is not None:
            collective = replace(collective, observer=verification.expect)
        x, out = request.flat()
        state = yield from collective.run(x, out)
        if key is not None:
            self._states[key] = state
        if verification is not None:
            verification.keep(out)
        if observation is not None:
            observation.see(out)
        result = request.deliver(out)
        fence.leave()
        if alarm is not None:
            bad = (~torch.isfinite(out)).any().to(torch.float32).view(1)
            yield from alarm.run(bad, bad)
            if bad.item():
                return NonFiniteError(
                    f"{request.name}: the reduced tensor holds a NaN or an infinity (an input on "
                    f"some rank did, or the sum overflowed); every rank raises this"
                    f"{request.contents and f'. The tensor holds {request.contents}'}"
                )
        return result


def _uncompressed(dtype: torch.dtype) -> Compressor:
    return compressor_registry.read({"kind": "uncompressed", "format": _FORMATS[dtype]})
