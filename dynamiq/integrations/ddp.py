"""DDP's communication hook: which bucket this is, and what it travels as."""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from dynamiq.pipeline.handle import Handle
from dynamiq.pipeline.request import Request
from dynamiq.pipeline.settings import Settings

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class Start(Protocol):
    """Starts a request on the pipeline."""

    def __call__(self, request: Request, *, background: bool) -> Handle:
        """Return the call in flight."""


class Buckets:
    """Follows the buckets of one DDP model from step to step.

    DDP rebuilds its buckets after the first step and renumbers them, so nothing is keyed by
    bucket index: a bucket is known by the dtype and shapes of its parameters and its ordinal
    among equal ones in the step.

    A failed future would reach the user as a RuntimeError of torch's, and DDP would leave backward
    while later buckets are in flight and write into its buffers. So the futures always succeed,
    and the error itself is raised at the end of backward, when all of them have ended.
    """

    def __init__(self, settings: Settings, model: str) -> None:
        """Begin before the first step; ``model`` tells it from others on the same pipeline."""
        self.settings = settings
        self.model = model
        self.step = -1
        self._seen: Counter[str] = Counter()
        self._handles: list[Handle] = []
        self._in_backward = False

    def reduce(self, start: Start, bucket: "GradBucket") -> torch.futures.Future[Tensor]:
        """Start averaging a bucket in place; the future holds its buffer."""
        if bucket.index() == 0:
            self._begin_step()
        request = self._request(bucket)
        if request.tensor.is_sparse:
            handle, result = _reduce_sparse(start, request)
        else:
            handle = start(request, background=True)
            result = lambda: request.tensor  # noqa: E731
        if not self._in_backward:
            return handle.future().then(lambda ended: (ended.value(), result())[1])
        self._handles.append(handle)
        if bucket.is_last():
            # Where DDP queues its own callback, which waits for the futures; queued again when
            # backward ends, and so after it.
            queue = _engine().queue_callback
            queue(lambda: queue(self._raise_first_error))
        return handle.future().then(lambda _: result())

    def _begin_step(self) -> None:
        self._raise_first_error()  # of the last step, if its backward was nested in another
        self.step += 1
        self._seen.clear()
        try:
            _engine().queue_callback(lambda: None)
            self._in_backward = True
        except RuntimeError:
            # In join(), a rank that has run out of inputs is not in backward.
            self._in_backward = False

    def _raise_first_error(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            if handle.error is not None:
                raise handle.error

    def _request(self, bucket: "GradBucket") -> Request:
        parameters = bucket.parameters()
        skip = None
        if any(p.is_complex() for p in parameters):
            skip = "complex"
        elif self.settings.compresses and self.step < self.settings.start_step:
            skip = "warm-up"
        shapes = [str(list(p.shape)) for p in parameters]
        more = f" and {len(shapes) - 8} more" if len(shapes) > 8 else ""
        return Request(
            "all_reduce",
            bucket.buffer(),
            None,
            "mean",
            self._key(bucket),
            f"DDP bucket {bucket.index()} of step {self.step}",
            skip=skip,
            contents=f"the gradients of parameters of shapes {', '.join(shapes[:8])}{more}",
        )

    def _key(self, bucket: "GradBucket") -> str:
        shapes = ";".join(f"{p.dtype}{list(p.shape)}" for p in bucket.parameters())
        digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
        self._seen[digest] += 1
        return f"{self.model}-{digest}-{self._seen[digest]}"


def _engine() -> Any:
    return torch.autograd.Variable._execution_engine


def _reduce_sparse(start: Start, request: Request) -> tuple[Handle, Callable[[], Tensor]]:
    """Average a sparse bucket: agree on the rows that any rank has, then reduce these densely."""
    sparse = request.tensor.coalesce()
    shape, leading = sparse.shape, sparse.sparse_dim()
    sizes = shape[:leading]
    strides = torch.tensor([sizes[i + 1 :].numel() for i in range(leading)])
    rows = (sparse.indices() * strides[:, None].to(sparse.device)).sum(0)
    # Ranks hold different rows, so the request's own size cannot be compared: these can.
    present = torch.zeros(sizes.numel(), dtype=torch.float32, device=sparse.device)
    present[rows] = 1.0
    part = replace(request, key=None, skip="sparse", op="sum", tensor=present)
    start(part, background=True).wait()
    union = present.nonzero()[:, 0]
    values = torch.zeros(len(union), *shape[leading:], dtype=sparse.dtype, device=sparse.device)
    values[torch.searchsorted(union, rows)] = sparse.values()
    indices = torch.stack(torch.unravel_index(union, sizes))
    handle = start(replace(part, op="mean", tensor=values), background=True)
    return handle, lambda: torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=True, check_invariants=False
    )
