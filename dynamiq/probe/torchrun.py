"""The group of ranks that torchrun started, for a command that has none of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from dynamiq.core.errors import ConfigurationError, TransportError
from dynamiq.core.transport import Transport
from dynamiq.transports import GlooTransport, NCCLTransport

START = "torchrun --nproc-per-node 4 --no-python dynamiq probe"
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_LONGEST_S = 1e6


def device_of_rank(kind: str | None) -> torch.device:
    """Return this rank's device.

    Args:
        kind: "cpu" or "cuda"; None for CUDA if there is a GPU.

    Raises:
        ConfigurationError: Not started by torchrun, or with one rank, or no such device.
    """
    missing = [name for name in _SET_BY_TORCHRUN if name not in os.environ]
    if missing:
        raise ConfigurationError(
            f"a probe runs on a group of ranks, and {missing[0]} is not set; start it with "
            f"torchrun: {START}"
        )
    if os.environ["WORLD_SIZE"] == "1":
        raise ConfigurationError(
            f"a probe measures what ranks do together, and this group has one: {START}"
        )
    has_gpu = torch.cuda.is_available()
    kind = kind or ("cuda" if has_gpu else "cpu")
    if kind not in ("cpu", "cuda"):
        raise ConfigurationError(f"a device is cpu or cuda, not {kind}")
    if kind == "cpu":
        return torch.device("cpu")
    if not has_gpu:
        raise ConfigurationError(
            "torch sees no CUDA device; check the driver and CUDA_VISIBLE_DEVICES, or use the cpu"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def is_first() -> bool:
    """Return whether this is the rank that speaks for all."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(device: torch.device, timeout_s: float) -> Iterator[Transport]:
    """Be in the group, over NCCL or Gloo; yields a transport that is not connected yet.

    Raises:
        ConfigurationError: ``timeout_s`` is out of range.
        TransportError: The ranks do not find each other.
    """
    if not 0 < timeout_s <= _LONGEST_S:
        raise ConfigurationError(
            f"a timeout is more than 0 and at most {_LONGEST_S:g} seconds, not {timeout_s:g}"
        )
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    try:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise TransportError(f"the ranks of torchrun's group do not meet: {first}") from error
    kind = NCCLTransport if on_gpu else GlooTransport
    transport = kind(timeout_s=timeout_s)
    try:
        yield transport
    finally:
        transport.close()
        # After a failure the group may be broken already.
        with suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
