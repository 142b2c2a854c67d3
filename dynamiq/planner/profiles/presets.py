"""Common clusters: links and GPUs by their data sheets, or as somebody measured them.

A line rate is what a vendor promises; whether a group of ranks reaches it, ``dynamiq probe`` tells.
"""

from dataclasses import dataclass

from dynamiq.core.errors import ConfigurationError
from dynamiq.planner.profiles.hardware import HardwareProfile, Link, Processor

_TCP = 1448 / 1538
"""Of an Ethernet line, with frames of 1500 bytes: headers of TCP (with time stamps), IP and
Ethernet, and the gap between frames, take the rest."""
_TCP_LATENCY_S = 28e-6
_NCCL_NETWORK_S, _NCCL_NVLINK_S = 18e-6, 11.8e-6
_MESSAGE_S = 20e-6
_OF_TCP = (
    "line rate less headers at 1500 bytes per frame; latency measured by RTI Perftest 6.1 (TCP, "
    "10 Gbit/s, one way, 27 to 30 µs for 32 to 1024 bytes)"
)
_OF_INFINIBAND = (
    "line rate (InfiniBand Trade Association); latency from NCCL's own model, src/graph/tuning.cc: "
    "8.4 µs for a ring's step and 9.6 µs for the network"
)


@dataclass(frozen=True)
class LinkPreset:
    """A kind of link.

    Attributes:
        link: What it does for all ranks that share it.
        measured: Whether the bandwidth is a measured one; if not, it is a line rate.
        source: Where the figures come from.
    """

    link: Link
    measured: bool
    source: str


def _ethernet(gbit: float) -> LinkPreset:
    link = Link(latency_s=_TCP_LATENCY_S, bandwidth_bytes_per_s=gbit * 1e9 / 8 * _TCP)
    return LinkPreset(link, False, _OF_TCP)


def _infiniband(gbit: float) -> LinkPreset:
    link = Link(latency_s=_NCCL_NETWORK_S, bandwidth_bytes_per_s=gbit * 1e9 / 8)
    return LinkPreset(link, False, _OF_INFINIBAND)


NETWORKS = {
    "ethernet-1g": _ethernet(1),
    "ethernet-10g": _ethernet(10),
    "ethernet-25g": _ethernet(25),
    "ethernet-100g": _ethernet(100),
    "ethernet-400g": _ethernet(400),
    "infiniband-100g": _infiniband(100),
    "infiniband-200g": _infiniband(200),
    "infiniband-400g": _infiniband(400),
}
"""Between machines: one interface, which all ranks of a machine share."""

NODES = {
    "nvlink-a100": LinkPreset(
        Link(latency_s=_NCCL_NVLINK_S, bandwidth_bytes_per_s=195e9),
        True,
        "bandwidth measured by nccl-tests, sendrecv_perf on 8 A100 (github.com/li-plus/playground, "
        "cuda/nccl.md: 195 GB/s each way of 300); latency from NCCL's src/graph/tuning.cc, 8.4 µs "
        "for a ring's step and 3.4 µs for NVLink",
    ),
    "nvlink-h100": LinkPreset(
        Link(latency_s=_NCCL_NVLINK_S, bandwidth_bytes_per_s=450e9),
        False,
        "NVIDIA H100 datasheet: 900 GB/s, half of it each way; latency as for nvlink-a100",
    ),
}
"""Inside a machine, for each rank."""

GPUS = {
    "A100": Processor(device="cuda", name="NVIDIA A100 80GB SXM", memory_bytes_per_s=2.039e12),
    "H100": Processor(device="cuda", name="NVIDIA H100 SXM", memory_bytes_per_s=3.35e12),
    "H200": Processor(device="cuda", name="NVIDIA H200 SXM", memory_bytes_per_s=4.8e12),
}
"""By their data sheets; what a message costs the processor is an assumption, 20 µs."""

NCCL_CHANNELS = 1
"""Calls in flight at once that NCCL's transport keeps."""


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind on machines of one kind.

    Attributes:
        world_size: Ranks.
        ranks_per_node: How many of them share a machine.
        network: Between machines; None for one machine.
        node: Inside a machine; None for machines with one rank.
        gpu: A key of :data:`GPUS`.
        source: Of the links.
    """

    world_size: int
    ranks_per_node: int
    network: Link | None
    node: Link | None
    gpu: str
    source: str

    def profile(self) -> HardwareProfile:
        """Return the profile.

        Raises:
            ConfigurationError: No such GPU, a rank alone, ranks that do not fill machines, or a
                link that is missing.
        """
        n, g = self.world_size, self.ranks_per_node
        if n < 2:
            raise ConfigurationError(
                f"a plan needs at least 2 ranks, got {n}: one rank alone sends nothing"
            )
        if g < 1 or n % g:
            raise ConfigurationError(
                f"{n} ranks cannot be split into machines of {g}: the number of ranks is a "
                f"multiple of the ranks of a machine"
            )
        if n > g and self.network is None:
            raise ConfigurationError("ranks on several machines need a network: its bandwidth")
        if g > 1 and self.node is None:
            raise ConfigurationError(
                f"machines of {g} ranks need a link inside, such as {', '.join(NODES)}"
            )
        if self.gpu not in GPUS:
            raise ConfigurationError(f"no GPU {self.gpu!r}; there are {', '.join(GPUS)}")
        processor = GPUS[self.gpu].model_copy(update={"message_s": _MESSAGE_S})
        network = self.network or self.node
        assert network is not None
        return HardwareProfile(
            name=f"{n} {self.gpu}",
            source=self.source,
            world_size=n,
            ranks_per_node=g,
            channels=NCCL_CHANNELS,
            network=network,
            node=self.node if g > 1 else None,
            processor=processor,
        )
