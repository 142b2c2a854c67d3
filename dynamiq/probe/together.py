"""What the ranks of a probe do together: exchange bytes at a distance, agree, begin at once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dynamiq.core.transport import Transport


class Together:
    """The ranks of a connected transport; every method is collective.

    Attributes:
        rank: This rank.
        world_size: Ranks.
        device: Where payloads are.
    """

    def __init__(self, transport: Transport, device: torch.device) -> None:
        """Use a transport that is connected; it stays the caller's to close."""
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.device = device
        self._transport = transport

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return, for each of the values, the largest that any rank has; the same on all ranks.

        In ⌈log₂ n⌉ rounds, in each of which a rank hears of twice as many. No rank returns before
        all have come, so it also makes them begin what follows at about the same time.
        """
        mine = torch.tensor(list(values), dtype=torch.float64)
        distance = 1
        while distance < self.world_size:
            sent = mine.view(torch.uint8).to(self.device)
            received = self.exchange(sent, distance, label="agreement")()
            assert received is not None
            mine = torch.maximum(mine, received.cpu().view(torch.float64))
            distance *= 2
        return mine.tolist()

    def exchange(
        self,
        payload: Tensor,
        distance: int,
        *,
        within: int | None = None,
        into: Tensor | None = None,
        label: str = "probe",
    ) -> Callable[[], Tensor | None]:
        """Start sending to the rank that is ``distance`` on, and receiving from that before.

        Args:
            payload: uint8[m], m the same on all ranks.
            distance: Counted in a circle of ``within`` consecutive ranks; None means all.
            within: Divides the number of ranks.
            into: uint8[m] for what is received.
            label: What this is, for error messages.
        """
        size = within or self.world_size
        first, place = self.rank - self.rank % size, self.rank % size
        to, source = first + (place + distance) % size, first + (place - distance) % size
        return self._transport.post(payload, to, payload.numel(), source, 0, label, into)

    def settle(self) -> None:
        """Wait for the device, if it works on its own."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
