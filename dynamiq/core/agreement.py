"""The header every call begins with: ranks that disagree find out before any payload moves.

A receive that is smaller than its message aborts a Gloo process, and a larger one is silently
filled in part; only comparing first turns a mismatch into an error.
"""

import hashlib
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamiq.core.compressor import State
from dynamiq.core.errors import AgreementError

HEADER_BYTES = 16
DESCRIPTION_BYTES = 512


@dataclass(frozen=True)
class Header:
    """What must be equal on all ranks in one call.

    Attributes:
        number: The call number.
        description: The call in words, e.g. ``all_reduce "mean" of float32[10] ...``.
        state: Digest of the state that all ranks share.
    """

    number: int
    description: str
    state: bytes = b""

    def pack(self) -> Tensor:
        """Return uint8[16]: the call number (4 bytes) and a digest of the rest (12 bytes)."""
        text = self.description.encode()
        digest = hashlib.blake2b(text + b"\0" + self.state, digest_size=HEADER_BYTES - 4)
        number = (self.number & 0xFFFFFFFF).to_bytes(4, "little")
        return _tensor(number + digest.digest())

    def explain(self) -> Tensor:
        """Return uint8[512]: the call in words, exchanged only after a mismatch."""
        text = f"#{self.number}: {self.description}".encode()
        if self.state:
            text += f", state {self.state.hex()[:12]}".encode()
        return _tensor(text[:DESCRIPTION_BYTES].ljust(DESCRIPTION_BYTES))


def disagreement(rank: int, mine: Tensor, peer: int, theirs: Tensor) -> AgreementError:
    """Return the error that names both calls, from the ranks' explanations."""
    return AgreementError(
        f"ranks are not in the same call: rank {rank} is in {_text(mine)}, but rank {peer} is in "
        f"{_text(theirs)}; every rank must make the same calls in the same order, with the same "
        f"sizes, dtypes, ops and keys. Nothing was sent or written by this call"
    )


def state_digest(state: State) -> bytes:
    """Return 16 bytes over the shared part of a state; empty for an empty one."""
    if not state.shared:
        return b""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in sorted(state.shared.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(
            value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        )
    return digest.digest()


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _text(explanation: Tensor) -> str:
    return bytes(explanation.tolist()).decode(errors="replace").strip()


def check_hellos(hellos: list[bytes]) -> None:
    """Compare what every rank said at connect: JSON objects of the same fields.

    Raises:
        AgreementError: On every rank alike, naming the fields and ranks that differ.
    """
    described = [json.loads(hello) for hello in hellos]
    first = described[0]
    differences = [
        f"{name}: rank 0 has {json.dumps(first.get(name))}, rank {rank} has "
        f"{json.dumps(other.get(name))}"
        for rank, other in enumerate(described)
        for name in sorted(first.keys() | other.keys())
        if first.get(name) != other.get(name)
    ]
    if differences:
        shown = "; ".join(differences[:5])
        more = f" (and {len(differences) - 5} more)" if len(differences) > 5 else ""
        raise AgreementError(
            f"ranks are configured differently: {shown}{more}; build the pipeline with the same "
            f"arguments on every rank"
        )
