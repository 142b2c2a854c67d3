"""Bytes are forever: what files of golden payloads hold, how they are made, and how they are read.

``tests/golden/<format>/*.json`` hold a configuration, the reduced statistics if there are any,
every payload of one call, and its result. A change that makes their tests fail is another wire
format and needs another ``kind``. To add a case, name it in CASES of the format's test, and run
that as a module:

    python -m tests.compressors.test_dynamiq_golden

which writes the files that are missing and never touches one that is there.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dynamiq import Compressor, Topology
from dynamiq.core.compressor import State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry, topology_registry
from dynamiq.core.topology import Schedule
from tests.contracts import compressor as contract

GRADIENT_LIKE = tuple(2.0**-k for k in (0, 3, 9, 4, 12, 1))
EXTREME = (2.0**100, 1.0, 0.0, 2.0**-130, float("nan"), 2.0**-20)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        compressor: Configuration.
        topology: Who sends what to whom.
        world_size: Ranks.
        numel: Entries.
        call: Seed, number, divisor.
        bounds: Of chunks, or None.
        scales: Magnitude of supergroup i modulo their number.
    """

    compressor: Compressor
    topology: Topology
    world_size: int
    numel: int
    call: Call
    bounds: tuple[int, ...] | None = None
    scales: tuple[float, ...] = GRADIENT_LIKE

    def gradients(self) -> Tensor:
        """Return float32[n, d] from integers: the same on every machine and in every version."""
        rank = torch.arange(self.world_size)[:, None]
        i = torch.arange(self.numel)
        mixed = (i * 40503 + rank * 30011 + i * i * 7919 + i * rank * 17) % 65536
        within = 2.0 ** -(i // 16 % 5).double()
        scale = torch.tensor(self.scales, dtype=torch.float64)[i // 256 % len(self.scales)]
        return ((mixed - 32768) / 32768 * within * scale).float()

    def exact(self) -> Tensor:
        """Return float64[d], what the result should be."""
        return self.gradients().double().sum(0) / self.call.divisor


@dataclass(frozen=True)
class Goldens:
    """The files of one format.

    Attributes:
        name: Of the folder.
        cases: By the name of the file.
        state: What else of a call's outcome a file holds, by field.
    """

    name: str
    cases: dict[str, Case]
    state: dict[str, Callable[[contract.Outcome], Any]]

    @property
    def folder(self) -> Path:
        return Path(__file__).parents[1] / "golden" / self.name

    def load(self, name: str) -> dict[str, Any]:
        """Return what the file of a case holds."""
        return json.loads((self.folder / f"{name}.json").read_text("utf-8"))

    def write_missing(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in self.cases:
            path = self.folder / f"{name}.json"
            if path.exists():
                print(f"{path.name} is there and stays as it is")
            else:
                path.write_text(json.dumps(self.run(name), indent=1) + "\n", "utf-8")
                print(f"{path.name} is new")

    def run(self, name: str) -> dict[str, Any]:
        """Return what the file of a case would hold if it were made now."""
        case, given = self.cases[name], []
        encode = type(case.compressor).encode

        def recorded(compressor: Compressor, statistics: Tensor | None, *rest: Any) -> Any:
            given.append(statistics)
            return encode(compressor, statistics, *rest)

        with mock.patch.object(type(case.compressor), "encode", recorded):
            outcome = contract.all_reduce(
                case.compressor, case.topology, case.gradients(), call=case.call, bounds=case.bounds
            )
        payloads = sorted(outcome.payloads.items(), key=lambda item: str(item[0]))
        return {
            "compressor": case.compressor.to_dict(),
            "topology": case.topology.to_dict(),
            "world_size": case.world_size,
            "numel": case.numel,
            "bounds": case.bounds and list(case.bounds),
            "call": asdict(case.call),
            "statistics": None if given[0] is None else to_hex(given[0]),
            "payloads": [{**asdict(m), "bytes": payload.hex()} for (m, _), payload in payloads],
            "result": to_hex(outcome.outs[0]),
            **{field: of(outcome) for field, of in self.state.items()},
        }

    def assert_written_again(self, name: str) -> None:
        """The same entries give the same bytes."""
        now = self.run(name)
        for field, value in self.load(name).items():
            assert now[field] == value, f"{field} changed"

    def assert_read(self, name: str) -> None:
        """With nothing but the file: configuration, statistics and finished chunks."""
        held = self.load(name)
        compressor = compressor_registry.read(held["compressor"])
        schedule = Schedule(topology_registry.read(held["topology"]), held["world_size"])
        bounds = held["bounds"] and tuple(held["bounds"])
        layout = Layout(held["numel"], held["world_size"], 256, bounds)
        statistics = held["statistics"] and from_hex(held["statistics"], torch.float32)
        encoding = compressor.encode(statistics, layout, schedule, Call(**held["call"]), State())
        out = torch.full((held["numel"],), torch.nan)
        work = encoding.load(torch.zeros(held["numel"]), 0, out)

        everything, decoded = range(encoding.positions), 0
        for entry in held["payloads"]:
            payload = from_hex(entry.pop("bytes"), torch.uint8)
            message = Message(**entry)
            assert payload.numel() == encoding.payload_bytes(message, everything)
            if message == schedule.gather_message(message.chunk):
                encoding.decompress(payload, work, message, everything)
                decoded += 1
        encoding.store(work, out)

        assert decoded == held["world_size"]
        assert to_hex(out) == held["result"]

    def assert_complete(self) -> None:
        """Every file has a case."""
        assert {path.stem for path in self.folder.glob("*.json")} == set(self.cases)


def to_hex(values: Tensor) -> str:
    """Write float32[...] as little-endian bytes."""
    return values.numpy().astype("<f4").tobytes().hex()


def from_hex(text: str, dtype: torch.dtype) -> Tensor:
    """Read what :func:`to_hex` wrote, into memory that payloads may be in."""
    raw = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
    return raw.view(dtype)
