"""A profile as tables."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table

from dynamiq.planner.profiles.hardware import CodecCost, HardwareProfile, Link

_ENTRIES = 1 << 22


def tables(profile: HardwareProfile) -> Group:
    """Return what was measured: of the links, then of the formats."""
    links = Table(title=profile.name, box=SIMPLE_HEAD, pad_edge=False)
    links.add_column("link")
    for head in ("latency", "Gbit/s"):
        links.add_column(head, justify="right")
    for name, link in _links(profile):
        rate = f"{link.bandwidth_bytes_per_s * 8 / 1e9:.3g}"
        links.add_row(name, f"{1e6 * link.latency_s:.0f} µs", rate)
    formats = Table(box=SIMPLE_HEAD, pad_edge=False)
    formats.add_column("format")
    formats.add_column(f"ms for {_ENTRIES / 1e6:.1f}M entries", justify="right")
    formats.add_column("entries/s", justify="right")
    for codec in profile.processor.codecs:
        seconds = all_reduce_s(codec, _ENTRIES, profile.world_size)
        formats.add_row(name_of(codec), f"{1e3 * seconds:.1f}", f"{_ENTRIES / seconds:.2e}")
    return Group(links, formats)


def name_of(codec: CodecCost) -> str:
    """Return what tables call a format."""
    compressor = codec.compressor
    what = getattr(compressor, "format", compressor.kind)
    bits = getattr(compressor, "bit_budget", None)
    return str(what) if bits is None else f"{what}, {bits:g} bits"


def all_reduce_s(codec: CodecCost, entries: int, world_size: int) -> float:
    """Return the seconds that a rank works on entries in a ring's all-reduce, in one segment."""
    n, message = world_size, entries / world_size
    per_call = (codec.statistics, codec.encode, codec.next_state)
    seconds = sum(cost.fixed_s + cost.entry_s * entries for cost in per_call)
    for cost, count in ((codec.compress, 1), (codec.recompress, n - 1), (codec.decompress, n)):
        seconds += count * (cost.fixed_s + cost.entry_s * message)
    return seconds


def _links(profile: HardwareProfile) -> Iterator[tuple[str, Link]]:
    if profile.node is not None:
        yield "inside a machine, each rank", profile.node
    if profile.ranks_per_node < profile.world_size:
        shared = f", {profile.ranks_per_node} ranks together" if profile.node is not None else ""
        yield f"between machines{shared}", profile.network
