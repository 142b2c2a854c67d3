"""Where the ranks are: which of them share a machine's link, and which its processors."""

import json
import os
import platform
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from dynamiq.core.description import Value
from dynamiq.core.errors import InputError


class Place(Value):
    """Where one rank is.

    Attributes:
        machine: Equal for ranks that share processors.
        node: Equal for ranks that share network interfaces: a machine, or a container of it.
        cores: Processors on which this rank may run, by number.
        device: "cpu" or "cuda".
        name: Of the processor or GPU.
    """

    machine: str
    node: str
    cores: tuple[int, ...]
    device: Literal["cpu", "cuda"]
    name: str

    @classmethod
    def here(cls, device: torch.device) -> "Place":
        """Return this process's."""
        host, is_gpu = socket.gethostname(), device.type == "cuda"
        machine = _line("/proc/sys/kernel/random/boot_id") or host
        return cls(
            machine=machine,
            node=f"{host} {machine} {_network_namespace()}",
            cores=_cores(),
            device="cuda" if is_gpu else "cpu",
            name=torch.cuda.get_device_name(device) if is_gpu else _processor(),
        )

    @classmethod
    def read(cls, hello: bytes) -> "Place":
        """Return what a rank has said of itself.

        Raises:
            InputError: It says something else: it is not in a probe of this version.
        """
        try:
            return cls(**json.loads(hello))
        except Exception as error:
            raise InputError(
                "a rank of this group is not in a probe of this version of dynamiq; start all "
                "ranks with the same command"
            ) from error


def cores_per_rank(places: Sequence[Place]) -> float:
    """Return how many processors the rank that has the least can count on."""
    users = Counter((place.machine, core) for place in places for core in place.cores)
    return min(sum(1 / users[place.machine, core] for core in place.cores) for place in places)


def ranks_per_node(places: Sequence[Place]) -> int:
    """Return how many ranks each node has.

    Raises:
        InputError: Nodes have different numbers, or their ranks do not follow each other.
    """
    counts = Counter(place.node for place in places)
    most = max(counts.values())
    blocks = [places[i : i + most] for i in range(0, len(places), most)]
    if any(len({place.node for place in block}) > 1 or len(block) < most for block in blocks):
        raise InputError(
            f"the planner takes machines with equally many consecutive ranks each, as torchrun "
            f"numbers them; here ranks are on machines {_numbers(places)}, in their order"
        )
    return most


def _numbers(places: Sequence[Place]) -> str:
    nodes = list(dict.fromkeys(place.node for place in places))
    return ", ".join(str(nodes.index(place.node)) for place in places)


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _network_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/net").readlink())
    except OSError:
        return ""  # other systems have one network per machine


def _line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _processor() -> str:
    for line in _line("/proc/cpuinfo").splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
