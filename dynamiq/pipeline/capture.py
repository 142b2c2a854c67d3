"""How ``capture`` learns what a training's gradients are like: a small collective beside a call."""

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dynamiq.core.collective import Algorithm, Collective
from dynamiq.core.drivers import Meter
from dynamiq.core.errors import InputError
from dynamiq.pipeline.executor import Executor
from dynamiq.pipeline.ledger import Ledger
from dynamiq.pipeline.request import Request

if TYPE_CHECKING:
    from dynamiq.planner.profiles.spectrum import GradientSpectrum


class Capture:
    """What was seen of the first calls with each key; safe to read while a worker writes."""

    def __init__(self, calls: int | None) -> None:
        """Look at so many calls with each key, or at none."""
        self._calls = calls
        self._begun: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._observed: Any = None

    def due(self, request: Request) -> bool:
        """Return whether a call is to be observed, and count it; the same on all ranks."""
        if self._calls is None or request.output is not None or request.skip == "sparse":
            return False
        key = self.name(request)
        self._begun[key] += 1
        return self._begun[key] <= self._calls and request.tensor.numel() > 0

    @staticmethod
    def name(request: Request) -> str:
        """Return what tells tensors apart: the key, or the size of those that have none."""
        return f"{request.tensor.numel()} entries" if request.key is None else request.key

    def add(self, name: str, reduced: Tensor, world_size: int) -> None:
        """Add what all ranks have seen of a call."""
        from dynamiq.planner.errors.observation import Observed

        with self._lock:
            self._observed = self._observed or Observed()
            self._observed.add(name, reduced, world_size)

    def spectrum(self) -> "GradientSpectrum":
        """Return the spectrum so far.

        Raises:
            InputError: Nothing is captured, or nothing was yet.
        """
        if self._calls is None:
            raise InputError(
                "this pipeline captures no spectrum; Pipeline(..., capture=20) looks at the first "
                "20 calls with each key"
            )
        with self._lock:
            if self._observed is None:
                raise InputError("no gradient was captured yet: no call that had one has ended")
            found: GradientSpectrum = self._observed.spectrum()
            return found


class Observation:
    """One call observed: a sum over ranks, in float64, of what each sees of its entries."""

    def __init__(self, request: Request, divisor: int) -> None:
        """Copy the entries before the call that is observed replaces them.

        Args:
            request: The call.
            divisor: What its result is divided by.
        """
        from dynamiq.planner.errors.observation import observed_numel

        self._name = Capture.name(request)
        self._entries = request.tensor.detach().reshape(-1).clone()
        self._divisor = divisor
        count = observed_numel(self._entries.numel())
        self.summary = torch.full(
            (count,), torch.nan, dtype=torch.float64, device=self._entries.device
        )

    def see(self, result: Tensor) -> None:
        """Look at the result while its owner has not changed it."""
        from dynamiq.planner.errors.observation import observe

        total = result.double() * self._divisor
        self.summary.copy_(observe(self._entries, total))
        del self._entries

    def start(
        self,
        collective: Collective,
        executor: Executor,
        records: tuple[Capture, Ledger],
        key: str | None,
        *,
        background: bool,
    ) -> None:
        """Sum over ranks, after the call with the same key."""
        capture, ledger = records

        def conclude(reduced: Tensor, meter: Meter) -> None:
            capture.add(self._name, reduced, collective.schedule.world_size)
            ledger.record_capture(meter)

        number = collective.call.number
        executor.run(self._run(collective), number, key, conclude, background=background)

    def _run(self, collective: Collective) -> Algorithm[Tensor]:
        yield from collective.run(self.summary, self.summary)
        return self.summary
