"""DDP's communication hook: which bucket this is, and what it travels as."""

import hashlib
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

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
    """

    def __init__(self, settings: Settings, model: str) -> None:
        """Begin before the first step; ``model`` tells it from others on the same pipeline."""
        self.settings = settings
        self.model = model
        self.step = -1
        self._seen: Counter[str] = Counter()

    def reduce(self, start: Start, bucket: "GradBucket") -> torch.futures.Future[Tensor]:
        """Start averaging a bucket in place; the future holds its buffer."""
        if bucket.index() == 0:
            self.step += 1
            self._seen.clear()
        buffer, parameters = bucket.buffer(), bucket.parameters()
        name = f"DDP bucket {bucket.index()} of step {self.step}"
        skip = None
        if any(p.is_complex() for p in parameters):
            skip = "complex"
        elif self.settings.compresses and self.step < self.settings.start_step:
            skip = "warm-up"
        shapes = [str(list(p.shape)) for p in parameters]
        more = f" and {len(shapes) - 8} more" if len(shapes) > 8 else ""
        contents = f"the gradients of parameters of shapes {', '.join(shapes[:8])}{more}"
        key = self._key(bucket)
        request = Request(
            "all_reduce", buffer, None, "mean", key, name, skip=skip, contents=contents
        )
        if buffer.is_sparse:
            return _reduce_sparse(start, request)
        return start(request, background=True).future()

    def _key(self, bucket: "GradBucket") -> str:
        shapes = ";".join(f"{p.dtype}{list(p.shape)}" for p in bucket.parameters())
        digest = hashlib.blake2b(shapes.encode(), digest_size=8).hexdigest()
        self._seen[digest] += 1
        return f"{self.model}-{digest}-{self._seen[digest]}"


def _reduce_sparse(start: Start, request: Request) -> torch.futures.Future[Tensor]:
    """Average a sparse bucket: agree on the rows that any rank has, then reduce these densely."""
    sparse = request.tensor.coalesce()
    shape, leading = sparse.shape, sparse.sparse_dim()
    sizes = shape[:leading]
    strides = torch.tensor([sizes[i + 1 :].numel() for i in range(leading)])
    rows = (sparse.indices() * strides[:, None].to(sparse.device)).sum(0)
    # Ranks hold different rows, so the request's own size cannot be compared: these can.
    present = torch.zeros(sizes.numel(), device=sparse.device)
    present[rows] = 1.0
    part = replace(request, key=None, skip="sparse", op="sum", tensor=present)
    start(part, background=True).wait()
    union = present.nonzero()[:, 0]
    values = torch.zeros(len(union), *shape[leading:], dtype=sparse.dtype, device=sparse.device)
    values[torch.searchsorted(union, rows)] = sparse.values()
    indices = torch.stack(torch.unravel_index(union, sizes))
    part = replace(part, op="mean", tensor=values)
    future = start(part, background=True).future()
    return future.then(
        lambda ended: torch.sparse_coo_tensor(indices, ended.value(), shape, is_coalesced=True)
    )
