"""How long messages take on a profile's links."""

from bisect import bisect_left
from dataclasses import dataclass

from dynamiq.planner.profiles.hardware import HardwareProfile, Link


@dataclass(frozen=True)
class Transfer:
    """One message of each rank, all at once.

    Attributes:
        link: 0 between machines, 1 inside one.
        occupied_s: How long the link takes nothing else.
        delay_s: From then until the bytes are there.
    """

    link: int
    occupied_s: float
    delay_s: float


def transfer(hardware: HardwareProfile, link: str, offset: int, nbytes: float) -> Transfer:
    """Return what sending to the rank that is ``offset`` ranks further takes.

    Ranks are numbered machine by machine. All ranks send at once, so as many of a machine share
    its network link as have their peer on another one.

    Args:
        hardware: The links.
        link: "network" or "node", as a step says.
        offset: Modulo the world size.
        nbytes: Of each rank's message.
    """
    ranks, size = hardware.world_size, hardware.ranks_per_node
    crossing = min(offset, ranks - offset, size) if ranks > size else 0
    if link == "network" and crossing:
        total = nbytes * crossing
        return Transfer(
            0, total / hardware.network.bandwidth_bytes_per_s, delay(hardware.network, total)
        )
    inside = hardware.node or hardware.network
    return Transfer(1, nbytes / inside.bandwidth_bytes_per_s, delay(inside, nbytes))


def delay(link: Link, nbytes: float) -> float:
    """Return by how much a message of this size takes longer than its bytes at full bandwidth.

    Between measured sizes on straight lines; beyond them, as the nearest.
    """
    if not link.measured:
        return link.latency_s
    sizes = [m.message_bytes for m in link.measured]
    at = bisect_left(sizes, nbytes)
    over = [
        max(0.0, m.time_s - m.message_bytes / link.bandwidth_bytes_per_s) for m in link.measured
    ]
    if at == 0:
        return over[0]
    if at == len(sizes):
        return over[-1]
    share = (nbytes - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
    return over[at - 1] + share * (over[at] - over[at - 1])
