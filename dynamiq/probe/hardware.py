"""Measures what a planner has to know of the ranks, on the ranks themselves."""

import json
import math
import time
from collections.abc import Callable
from statistics import median

import torch

from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.core.transport import Transport
from dynamiq.planner.profiles.hardware import HardwareProfile, Link, Processor
from dynamiq.probe.codecs import MESSAGE_ENTRIES, candidates, measure_codec
from dynamiq.probe.links import SIZES, LinkProbe, LinkTimes, distances, link_of
from dynamiq.probe.messages import thread_s_per_message
from dynamiq.probe.places import Place, cores_per_rank, ranks_per_node
from dynamiq.probe.together import Together

Progress = Callable[[int, int, str], None]
"""Told what is done, of how much, and what comes next."""
_COPIED_ENTRIES = 1 << 23


def probe(
    transport: Transport,
    device: torch.device | None = None,
    *,
    link_budget_s: float = 20.0,
    name: str = "",
    source: str = "dynamiq.probe.probe",
    progress: Progress | None = None,
) -> HardwareProfile:
    """Measure the links between the ranks of a transport, and what formats cost on their device.

    Collective: all ranks call it, and get the same profile. It takes ``link_budget_s`` and about a
    second for each format. Nothing else should run on the machines.

    Links: all ranks send at once, to the ranks that are as far away as in a ring and in a
    butterfly. Formats: all ranks do the operations of one rank at once.

    Args:
        transport: Not connected yet; it is connected here, and stays the caller's to close.
        device: Where gradients are; None for the CPU.
        link_budget_s: Time after which no larger messages are begun, per kind of link.
        name: Of the profile, for people.
        source: Where its figures come from.
        progress: Called on every rank.

    Raises:
        ConfigurationError: ``link_budget_s`` is not positive.
        InputError: There is one rank, or machines have different numbers of ranks.
        TransportError: The group cannot be joined, or a peer died or stayed silent.
    """
    device = device or torch.device("cpu")
    if not 0 < link_budget_s < math.inf:
        raise ConfigurationError(
            f"the time for links is a positive number of seconds, not {link_budget_s:g}"
        )
    hellos = transport.connect(json.dumps(Place.here(device).to_dict()).encode())
    places = [Place.read(hello) for hello in hellos]
    if len(places) < 2:
        raise InputError(
            "a probe measures what ranks do together, and this group has one; start it on at least "
            "two, with torchrun"
        )
    per_node = ranks_per_node(places)
    together = Together(transport, device)
    steps = _Steps(progress, per_node, len(places))
    network, node, cpu_byte_s = _links(together, per_node, link_budget_s, steps)
    return HardwareProfile(
        name=name or f"{len(places)} ranks, {places[0].name}",
        source=source,
        world_size=len(places),
        ranks_per_node=per_node,
        channels=transport.channels,
        network=network,
        node=node,
        processor=_processor(transport, together, places, cpu_byte_s, steps),
    )


class _Steps:
    """Counts what is done."""

    def __init__(self, progress: Progress | None, per_node: int, world_size: int) -> None:
        links = (per_node > 1) + (per_node < world_size)
        self._total = links * len(SIZES) + len(candidates()) * len(MESSAGE_ENTRIES)
        self._done = 0
        self._progress = progress
        self.what = ""

    def begin(self, what: str) -> None:
        """Say what comes next."""
        self.what = what
        self._tell()

    def advance(self) -> None:
        """Count one more."""
        self._done += 1
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total, self.what)


def _links(
    together: Together, per_node: int, budget_s: float, steps: _Steps
) -> tuple[Link, Link | None, float]:
    """Return the links between machines and inside one, and processor time per byte."""
    world_size = together.world_size

    def measure(what: str, reach: tuple[int, ...], within: int) -> LinkTimes:
        steps.begin(what)
        return LinkProbe(together, reach, within, budget_s, steps.advance).measure()

    inside = across = None
    if per_node > 1:
        inside = measure("links inside machines", distances(per_node), per_node)
    if per_node < world_size:
        reach = distances(world_size // per_node, per_node)
        across = measure("links between machines", reach, world_size)
    outer = across or inside
    assert outer is not None
    node = None if inside is None else link_of(inside.times)
    return link_of(outer.times, per_node), node, outer.cpu_byte_s


def _processor(
    transport: Transport,
    together: Together,
    places: list[Place],
    cpu_byte_s: float,
    steps: _Steps,
) -> Processor:
    own = places[together.rank]
    cores = cores_per_rank(places) if own.device == "cpu" else None
    memory_bytes_per_s = _memory_rate(together)
    message_s = thread_s_per_message(transport, together)
    codecs = []
    for compressor in candidates():
        bits = getattr(compressor, "bit_budget", None)
        steps.begin(f"{compressor.kind}{f', {bits:g} bits' if bits else ''}")
        codecs.append(measure_codec(compressor, together, cores, steps.advance))
    return Processor(
        device=own.device,
        name=own.name,
        cores_per_rank=cores,
        memory_bytes_per_s=memory_bytes_per_s,
        message_s=message_s,
        byte_s=cpu_byte_s if own.device == "cpu" else 0.0,
        codecs=tuple(codecs),
    )


def _memory_rate(together: Together) -> float:
    """Return the bytes per second that copies read and write, on the rank that is slowest."""
    source = torch.zeros(_COPIED_ENTRIES, device=together.device)
    target, taken = torch.zeros_like(source), []
    together.largest([0.0])
    for _ in range(5):
        together.settle()
        began = time.perf_counter()
        target.copy_(source)
        together.settle()
        taken.append(time.perf_counter() - began)
    (slowest_s,) = together.largest([median(taken)])
    return 2 * source.nbytes / slowest_s
