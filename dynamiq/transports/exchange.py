"""One post of a transport: what is checked before it, and the words of its errors.

All transports refuse the same arguments and report the same faults in the same words, so that a
test written against the loopback transport holds for the others.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.core.errors import InputError, PeerLostError, PeerTimeoutError


@dataclass(frozen=True)
class Exchange:
    """The arguments of one :meth:`dynamiq.core.transport.Transport.post`, and who posts it.

    Attributes:
        rank: The rank that posts.
        send: uint8[m] for the peer ``to``, or None.
        to: Peer that takes ``send``.
        nbytes: Bytes to receive; 0 receives nothing.
        source: Peer that brings them.
        channel: The FIFO to use.
        label: What this is, for error messages.
        into: uint8[nbytes] on the CPU that may be used for what is received, or None.
    """

    rank: int
    send: Tensor | None
    to: int
    nbytes: int
    source: int
    channel: int
    label: str
    into: Tensor | None = None

    @property
    def payload(self) -> Tensor | None:
        """What is really sent: an empty payload travels no more than an absent one."""
        return self.send if self.send is not None and self.send.numel() else None

    def check(self, world_size: int, channels: int) -> None:
        """Refuse what no transport can do, before anything moved.

        Raises:
            InputError: A peer or channel does not exist, or the payload is not plain bytes.
        """
        if not 0 <= self.channel < channels:
            raise InputError(f"channel {self.channel} asked for, there are {channels} ({self})")
        if self.nbytes < 0:
            raise InputError(f"cannot receive {self.nbytes} bytes ({self})")
        payload = self.payload
        peers = [self.to] if payload is not None else []
        peers += [self.source] if self.nbytes else []
        for peer in peers:
            if not 0 <= peer < world_size or peer == self.rank:
                raise InputError(
                    f"rank {self.rank} cannot exchange bytes with rank {peer}: peers are the "
                    f"other ranks of 0 to {world_size - 1} ({self})"
                )
        if payload is not None and (
            payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous()
        ):
            raise InputError(
                f"a payload is a contiguous uint8[m], not {payload.dtype}{list(payload.shape)} "
                f"with strides {payload.stride()} ({self})"
            )

        into = self.into
        if into is not None and (
            (into.dtype, into.shape) != (torch.uint8, (self.nbytes,))
            or not (into.is_cpu and into.is_contiguous())
        ):
            raise InputError(
                f"{self.nbytes} bytes are received into a contiguous uint8[{self.nbytes}] on the "
                f"CPU, not {into.dtype}{list(into.shape)} on {into.device} ({self})"
            )

    def lost(self, peer: int, reason: str) -> PeerLostError:
        """The connection to a peer broke."""
        return PeerLostError(
            f"rank {self.rank} lost rank {peer} while waiting {self._waiting_for(peer)} ({self}): "
            f"{reason}"
        )

    def timed_out(self, peer: int, seconds: float) -> PeerTimeoutError:
        """A peer stayed silent."""
        return PeerTimeoutError(
            f"rank {self.rank} waited {seconds:g} s {self._waiting_for(peer)} ({self}), in vain: "
            f"see what rank {peer} does; if it may be busy for that long, raise timeout_s"
        )

    def _waiting_for(self, peer: int) -> str:
        if peer == self.source and self.nbytes:
            return f"for {self.nbytes} bytes from rank {peer}"
        return f"for rank {peer} to take {0 if self.send is None else self.send.numel()} bytes"

    def __str__(self) -> str:
        return f"{self.label}, channel {self.channel}"
