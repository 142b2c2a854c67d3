"""The exact result beside ours: how ``verify_every`` measures the error of real calls."""

from typing import Any

import torch
from torch import Tensor

from dynamiq.core.collective import Algorithm, Collective
from dynamiq.core.compressor import Encoding
from dynamiq.core.drivers import Meter
from dynamiq.pipeline.executor import Executor
from dynamiq.pipeline.ledger import Ledger
from dynamiq.pipeline.request import Request


class Verification:
    """A second collective in float64 over a copy of the entries, compared with the result."""

    def __init__(self, request: Request, collective: Collective) -> None:
        """Copy the entries before the call to be verified replaces them."""
        self._collective = collective
        self._entries = request.tensor.detach().reshape(-1).to(torch.float64, copy=True)
        count = request.tensor.numel() if request.output is None else request.output.numel()
        self._exact = torch.empty(count, dtype=torch.float64, device=request.tensor.device)
        self._result: Tensor | None = None
        self._predicted: float | None = None

    def expect(self, encoding: Encoding[Any]) -> None:
        """Note the error that the call to be verified should have."""
        self._predicted = encoding.predicted_vnmse

    def keep(self, result: Tensor) -> None:
        """Copy the result to be verified, which its owner is free to change."""
        self._result = result.to(torch.float64, copy=True)

    def start(
        self, executor: Executor, ledger: Ledger, key: str | None, *, background: bool
    ) -> None:
        """Run the exact collective after the call with the same key and record the error."""

        def conclude(exact: Tensor, meter: Meter) -> None:
            assert self._result is not None
            error = (self._result - exact).square().sum().item()
            norm = exact.square().sum().item()
            ledger.record_verification(meter, error, norm, self._predicted)

        number = self._collective.call.number
        executor.run(self._run(), number, key, conclude, background=background)

    def _run(self) -> Algorithm[Tensor]:
        yield from self._collective.run(self._entries, self._exact)
        return self._exact
