"""A compressor, a topology and a transport, composed into collectives that users call."""

import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from dynamiq.core.compressor import Compressor
from dynamiq.core.errors import ClosedError, InputError
from dynamiq.core.topology import Topology
from dynamiq.core.transport import Transport
from dynamiq.pipeline import inputs
from dynamiq.pipeline.handle import Handle
from dynamiq.pipeline.inputs import Op
from dynamiq.pipeline.ledger import Metrics
from dynamiq.pipeline.request import Request, check_slices
from dynamiq.pipeline.session import Session
from dynamiq.pipeline.settings import Settings

if TYPE_CHECKING:
    from dynamiq.planner.profiles.spectrum import GradientSpectrum


class Pipeline:
    """Compressed collectives over a group of ranks.

    All ranks build it with the same arguments and make the same calls in the same order; every
    call begins with a comparison of what the ranks think it is. All ranks end with the same bits.
    Results are a deterministic function of the inputs, ``seed`` and the number of the call.

    An error before communication leaves everything as it was. After an error during
    communication the tensor's contents are undefined, the pipeline is closed, and later calls
    raise the first error again.

    Attributes:
        settings: What it was built with.
        transport: What moves its bytes.
    """

    def __init__(  # noqa: PLR0913 - independent options, by keyword
        self,
        compressor: Compressor,
        topology: Topology,
        transport: Transport,
        *,
        seed: int = 0,
        min_numel: int = 65_536,
        start_step: int = 2,
        segments: int | None = None,
        compress_float64: bool = False,
        on_nonfinite: Literal["propagate", "raise"] = "propagate",
        verify_every: int | None = None,
        capture: int | None = None,
    ) -> None:
        """Compose the parts; nothing is started or connected yet.

        Args:
            compressor: How entries become bytes.
            topology: Who sends which chunk to whom.
            transport: Moves bytes; belongs to this pipeline alone.
            seed: Of all randomness.
            min_numel: Calls with fewer entries travel uncompressed.
            start_step: DDP steps that travel uncompressed before compression begins.
            segments: Parts of each chunk that overlap encoding and transfer; same results. None
                chooses by the size of the tensor, 1 to 8.
            compress_float64: Compress float64 (in float32) instead of sending it as it is.
            on_nonfinite: "propagate" NaN and infinities, or "raise" NonFiniteError on every rank.
            verify_every: Also compute the exact result of every N-th compressed call, for
                ``metrics().vnmse``, which follows the call by one collective; costs 8 bytes per
                entry and pass.
            capture: Look at the first N all-reduces with each key, with DDP at each bucket in N
                steps, for :meth:`spectrum`; costs 0.75 bits per entry and pass, and a copy of the
                entries while such a call is under way. Uncompressed calls are as good as others.

        Raises:
            ConfigurationError: An argument is out of range or of the wrong kind.
        """
        self.transport = transport
        self.settings = Settings.check(
            transport,
            compressor=compressor,
            topology=topology,
            seed=seed,
            min_numel=min_numel,
            start_step=start_step,
            segments=segments,
            compress_float64=compress_float64,
            on_nonfinite=on_nonfinite,
            verify_every=verify_every,
            capture=capture,
        )
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._session = Session(self.settings, self.transport)
        # A pipeline that is dropped without being closed leaves no threads behind.
        weakref.finalize(self, self._session.executor.abandon).atexit = False
        self._buckets: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Pickle what it was built with: no group, thread, state or count."""
        return {"transport": self.transport, "settings": self.settings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pipeline that is not connected."""
        self.__dict__.update(state)
        self._begin()

    def __enter__(self) -> Self:
        """Return the pipeline; it is closed at the end of the block."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Close; at once if the block was left by an error, so that peers hear of it."""
        if error is not None:
            self._session.abort(ClosedError(f"the pipeline's block was left by {error!r}"))
        self.close()

    @property
    def rank(self) -> int:
        """This rank in the group.

        Raises:
            TransportError: Not connected yet.
        """
        self._session.check_connected()
        return self.transport.rank

    @property
    def world_size(self) -> int:
        """Ranks in the group.

        Raises:
            TransportError: Not connected yet.
        """
        self._session.check_connected()
        return self.transport.world_size

    def connect(self) -> None:
        """Join the group and check that all ranks are configured alike; collective, idempotent.

        The first collective does it, so calling it is only needed to fail early.

        Raises:
            AgreementError: Ranks differ; the fields are named, on every rank.
            ConfigurationError: The compressor cannot sum so many ranks, or the topology does not
                fit their number; on every rank.
            TransportError: The group cannot be joined.
        """
        with self._lock:
            self._session.connect()

    def all_reduce(
        self,
        tensor: Tensor,
        op: Op = "mean",
        *,
        key: str | None = None,
        async_op: bool = False,
    ) -> Handle | None:
        """Replace a tensor by its mean or sum over the ranks, in place.

        Args:
            tensor: float32, bfloat16, float16 or float64, any shape, any strides without overlap,
                on the transport's devices. float64 travels uncompressed unless allowed.
            op: "mean" or "sum".
            key: Names the tensor from call to call; needed by compressors that carry state.
            async_op: Return at once with a handle; leave the tensor alone until it has ended.

        Returns:
            A handle if ``async_op``, else None.

        Raises:
            InputError: The tensor, op or key is refused; nothing was sent.
            AgreementError: Another rank is in another call.
            TransportError: A peer died or stayed silent; names the peer this rank waited for.
            NonFiniteError: With ``on_nonfinite="raise"``, on every rank.
        """
        inputs.check_op(op)
        inputs.check_tensor(tensor)
        return self._call(
            Request("all_reduce", tensor, None, op, key, key or "all_reduce"), async_op
        )

    def reduce_scatter(
        self,
        output: Tensor,
        input: Tensor,
        op: Op = "mean",
        *,
        bounds: tuple[int, ...] | None = None,
        key: str | None = None,
        async_op: bool = False,
    ) -> Handle | None:
        """Reduce a tensor over the ranks and leave each with its slice.

        Args:
            output: Contiguous, the slice of this rank.
            input: Contiguous [d], the same dtype; left unchanged.
            op: "mean" or "sum".
            bounds: Offsets of the slices in ``input``, world_size + 1 of them; None for equal
                slices of ``output.numel()``.
            key: As in :meth:`all_reduce`.
            async_op: As in :meth:`all_reduce`.

        Raises:
            InputError: Sizes, dtypes or bounds do not fit; nothing was sent.
            DynamiqError: As in :meth:`all_reduce`.
        """
        inputs.check_op(op)
        inputs.check_tensor(output, "output")
        inputs.check_tensor(input, "input", written=False)
        self.connect()
        bounds = check_slices(output, input, bounds, self.rank, self.world_size)
        name = key or "reduce_scatter"
        return self._call(Request("reduce_scatter", input, output, op, key, name, bounds), async_op)

    def ddp_hook(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[Tensor]:
        """Average a DDP bucket: ``ddp.register_comm_hook(None, pipeline.ddp_hook)``.

        Asynchronous: backward goes on, several buckets may be in flight. The first
        ``start_step`` steps, sparse and complex buckets travel uncompressed and are counted in
        ``metrics().skips``. Models that share a pipeline are told apart by ``state``: register
        each with a string of its own instead of None.
        """
        from dynamiq.integrations import ddp

        inputs.check_not_capturing()
        if not isinstance(state, str | None):
            raise InputError(
                f"register_comm_hook(state, pipeline.ddp_hook) takes None or a name for the model "
                f"as state, got {state!r}; the group is an argument of the transport"
            )
        if isinstance(bucket, tuple):
            raise InputError(
                'ddp_hook got (gradient, parameter) from optimize_ddp="python_reducer"; set '
                "torch._dynamo.config.optimize_ddp = True"
            )
        model = state or ""
        if model not in self._buckets:
            self._buckets[model] = ddp.Buckets(self.settings, model)
        buckets: ddp.Buckets = self._buckets[model]
        return buckets.reduce(self._start, bucket)

    def metrics(self) -> Metrics:
        """Return this rank's totals so far; works on a closed pipeline."""
        return self._session.ledger.metrics()

    def spectrum(self) -> "GradientSpectrum":
        """Return what ``capture`` has seen of the gradients; works on a closed pipeline.

        Energies of supergroups and how alike the ranks are, the mean over steps, with no gradient
        in it: what :func:`dynamiq.planner.predicted_vnmse` predicts errors from. The same on
        all ranks once they have ended the same calls. ``spectrum().model_dump_json()`` is what one
        of them writes to a file.

        Raises:
            InputError: The pipeline captures nothing, or no call with a gradient has ended.
        """
        return self._session.capture.spectrum()

    def close(self) -> None:
        """Wait for calls in flight, then end the worker and the transport; idempotent.

        Raises:
            InputError: Called in a callback of a call's future, where it would wait for itself.
        """
        self._session.executor.check_may_block()
        with self._lock:
            self._session.executor.refuse()
        # Without the lock: a callback of a call in flight may be asking for it.
        self._session.close()

    def _call(self, request: Request, async_op: bool) -> Handle | None:
        inputs.check_not_capturing()
        if async_op:
            return self._start(request, background=True)
        self._session.executor.check_may_block()
        self._start(request, background=False).wait()
        return None

    def _start(self, request: Request, *, background: bool) -> Handle:
        with self._lock:
            return self._session.start(request, background=background)
