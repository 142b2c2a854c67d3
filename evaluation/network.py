"""Slow links on one machine: network namespaces joined by a switch, each link rate-limited.

    with Hosts(4, rate_mbit=25) as hosts:
        subprocess.run(hosts.command(0, ["hostname", "-I"]))

Each host is a namespace of its own with one interface ``eth0`` (10.77.0.0/24), and the switch that
joins them is a bridge in one more namespace: nothing appears in the machine's own network, so
neither addresses nor interface names can collide with it or with a second run.
"""

from __future__ import annotations

import ipaddress
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from evaluation import namespaces
from evaluation.interruption import interruptions_raise, uninterrupted
from evaluation.namespaces import NetworkError

_SUBNET = ipaddress.ip_network("10.77.0.0/24")
_MTU_BYTES = 1500
# tbf splits an offloaded packet (up to 64 KiB) only when it exceeds the burst: stay above it.
_MIN_BURST_BYTES = 72 * 1024
_BURST_S = 0.002
_QUEUE_S = 0.05
_UNLIMITED_MBIT = 10_000


class Network(Protocol):
    """Where ranks run: how to start a command there and how the others reach it."""

    @property
    def interface(self) -> str:
        """The network interface that every rank talks through."""

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` on the host of ``rank``."""

    def address(self, rank: int) -> str:
        """Return the IPv4 address of ``rank``."""

    def set_limited(self, limited: bool) -> None:
        """Make the links slow, if this network can, or lifts the limit for a while."""


@dataclass(frozen=True)
class Availability:
    """Whether ``Hosts`` can be made here. Its truth value is the answer.

    Attributes:
        reason: what is missing and what to do about it; empty when nothing is missing.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason


class Hosts:
    """``world_size`` hosts on one switch, each sending at most ``rate_mbit`` Mbit/s.

    A context manager. What it made is removed at the end of the block, whether by return,
    exception, SIGINT, SIGTERM or SIGHUP; entering it first removes what dead runs left behind.
    Processes still running on a host are killed.

    Args:
        world_size: number of hosts, 1 to 253.
        rate_mbit: line rate of each host's egress in Mbit/s (10⁶ bits), at least 0.1;
            receiving is not limited.

    Raises:
        ValueError: for a number of hosts or a rate outside these bounds.
        NetworkError: on entering, when the system refuses; ``available`` tells beforehand.
    """

    interface = "eth0"

    def __init__(self, world_size: int, *, rate_mbit: float) -> None:
        if not 1 <= world_size <= 253:
            raise ValueError(f"world_size must be 1 to 253, not {world_size}")
        if not 0.1 <= rate_mbit < float("inf"):
            raise ValueError(f"rate_mbit must be at least 0.1 Mbit/s and finite, not {rate_mbit}")
        self.world_size = world_size
        self.rate_mbit = rate_mbit
        self._prefix = namespaces.new_prefix()
        self._namespaces: list[str] = []
        self._signals = ExitStack()

    def __enter__(self) -> Self:
        namespaces.remove_leftovers()
        self._signals.enter_context(interruptions_raise())
        try:
            switch = self._add_namespace("switch")
            namespaces.configure(switch, ["link add switch type bridge", "link set switch up"])
            for rank in range(self.world_size):
                self._add_host(rank, switch)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._remove()

    def name(self, rank: int) -> str:
        """Return the namespace of ``rank``."""
        return f"{self._prefix}-host{rank}"

    def address(self, rank: int) -> str:
        """Return the IPv4 address of ``rank``."""
        return str(_SUBNET[rank + 1])

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs ``argv`` on the host of ``rank``."""
        return ["ip", "netns", "exec", self.name(rank), *argv]

    def set_limited(self, limited: bool) -> None:
        """Set all links to ``rate_mbit``, as at the start, or to more than they ever carry."""
        for rank in range(self.world_size):
            self._shape(rank, self.rate_mbit if limited else _UNLIMITED_MBIT)

    def measure_mbit(self, sender: int = 0, receiver: int = 1, *, seconds: float = 1.0) -> float:
        """Return the TCP payload rate from one host to another in Mbit/s, seen by the receiver.

        Takes about ``seconds``, and a fifth more before the clock starts.

        Raises:
            NetworkError: the receiver heard nothing for half a minute.
        """
        counted_bytes = max(256 * 1024, int(self.rate_mbit * 1e6 / 8 * seconds))
        probe = [sys.executable, "-S", str(Path(__file__).with_name("link_probe.py"))]
        receive = [*probe, "receive", self.address(receiver), str(counted_bytes)]
        send = [*probe, "send", self.address(receiver), str(counted_bytes)]
        with subprocess.Popen(
            self.command(receiver, receive),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        ) as receiving:
            try:
                namespaces.run(self.command(sender, send))
                answer, _ = receiving.communicate()
            finally:
                receiving.kill()
        if receiving.returncode:
            raise NetworkError(f"nothing arrived from {self.name(sender)}")
        return counted_bytes * 8 / float(answer) / 1e6

    def _add_namespace(self, role: str) -> str:
        name = f"{self._prefix}-{role}"
        self._namespaces.append(name)
        namespaces.add(name)
        return name

    def _add_host(self, rank: int, switch: str) -> None:
        host = self._add_namespace(f"host{rank}")
        port = f"port{rank}"
        link = f"link add {port} type veth peer name {self.interface} netns {host}"
        namespaces.configure(
            switch,
            [
                link,
                # An IPv6 link-local address would only be a second choice for Gloo to bind to.
                f"link set {port} addrgenmode none mtu {_MTU_BYTES} master switch",
                f"link set {port} up",
            ],
        )
        namespaces.configure(
            host,
            [
                "link set lo up",
                f"link set {self.interface} addrgenmode none mtu {_MTU_BYTES}",
                f"address add {self.address(rank)}/{_SUBNET.prefixlen} dev {self.interface}",
                f"link set {self.interface} up",
            ],
        )
        self._shape(rank, self.rate_mbit)

    def _shape(self, rank: int, rate_mbit: float) -> None:
        namespaces.run(["tc", "-n", self.name(rank), *_shaping(self.interface, rate_mbit)])

    def _remove(self) -> None:
        with self._signals, uninterrupted():
            while self._namespaces:
                namespaces.remove(self._namespaces.pop())


class Loopback:
    """All ranks in the machine's own network, over the loopback device: no slow link."""

    interface = "lo" if sys.platform == "linux" else "lo0"

    def address(self, rank: int) -> str:
        """Return 127.0.0.1, whatever the rank."""
        return "127.0.0.1"

    def command(self, rank: int, argv: Sequence[str]) -> list[str]:
        """Return ``argv`` unchanged."""
        return list(argv)

    def set_limited(self, limited: bool) -> None:
        """Do nothing: the loopback device has no limit."""


def available() -> Availability:
    """Tell whether this process can make ``Hosts``, by making and removing a namespace."""
    if sys.platform != "linux":
        return Availability(f"network namespaces are a Linux feature, this is {sys.platform}")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return Availability(f"no `{tool}` command: install the package iproute2")
    if os.geteuid() != 0:
        return Availability("making network namespaces needs root: run it with sudo")
    remedy = "a container needs --privileged, or --cap-add NET_ADMIN --cap-add SYS_ADMIN"
    trial = f"{namespaces.new_prefix()}-trial"
    try:
        namespaces.add(trial)
        namespaces.configure(trial, ["link add port type veth peer name eth0"])
        namespaces.run(["tc", "-n", trial, *_shaping("eth0", 25)])
        namespaces.run(["ip", "netns", "exec", trial, "true"])
    except NetworkError as error:
        return Availability(f"{error} ({remedy})")
    finally:
        namespaces.remove(trial)
    return Availability()


def _shaping(interface: str, rate_mbit: float) -> list[str]:
    rate_bytes = rate_mbit * 1e6 / 8
    burst_bytes = max(_MIN_BURST_BYTES, int(rate_bytes * _BURST_S))
    limit_bytes = burst_bytes + max(32 * _MTU_BYTES, int(rate_bytes * _QUEUE_S))
    rate = f"{round(rate_mbit * 1e6)}bit"
    shape = ["rate", rate, "burst", f"{burst_bytes}b", "limit", f"{limit_bytes}b"]
    return ["qdisc", "replace", "dev", interface, "root", "tbf", *shape]
