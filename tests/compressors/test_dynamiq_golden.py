"""Bytes are forever: payloads that earlier versions wrote are read, and written again.

``tests/golden/dynamiq/*.json`` hold a configuration, the reduced statistics, every payload of one
call, and its result. A change that makes these tests fail is another wire format and needs
another ``kind``. To add a case, name it in CASES and run

    python -m tests.compressors.test_dynamiq_golden

which writes the files that are missing and never touches one that is there.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq import Butterfly, DynamiQCompressor, Ring, Topology
from dynamiq.core.compressor import State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry, topology_registry
from dynamiq.core.topology import Schedule
from tests.contracts import compressor as contract

FOLDER = Path(__file__).parents[1] / "golden" / "dynamiq"

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

    compressor: DynamiQCompressor
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


CASES = {
    "paper": Case(DynamiQCompressor.paper(), Ring(), 3, 1300, Call(1, 7, 3)),
    "every-width": Case(
        DynamiQCompressor.paper(
            6.0,
            widths=(1, 2, 4, 8, 16),
            rounding="stochastic",
            energy="raw",
            group_scales="up",
            epsilon_4=0.23,
        ),
        Butterfly(),
        4,
        1536,
        Call(2**40, 0),
    ),
    "nearest-with-bounds": Case(
        DynamiQCompressor.paper(5.5, rounding="nearest"),
        Ring(),
        3,
        1300,
        Call(-5, 2**31),
        bounds=(0, 300, 300, 1300),
    ),
    "rotated": Case(DynamiQCompressor.rotated(4.0), Ring(), 3, 4000, Call(3, 5, 3)),
    "local": Case(DynamiQCompressor.local(4.0), Butterfly(), 5, 6000, Call(3, 6)),
    "extreme-values": Case(
        DynamiQCompressor.paper(4.0), Butterfly(), 2, 1536, Call(0, 1, 2), scales=EXTREME
    ),
}


GIVEN: list[Tensor] = []


class Recorded(DynamiQCompressor):
    """Keeps the statistics that it was given."""

    def encode(self, statistics: Tensor | None, *arguments: Any) -> Any:
        GIVEN.append(statistics)
        return super().encode(statistics, *arguments)


def run(case: Case) -> dict[str, Any]:
    """Return what a golden file holds."""
    compressor = Recorded.model_validate(case.compressor.to_dict())
    GIVEN.clear()
    outcome = contract.all_reduce(
        compressor, case.topology, case.gradients(), call=case.call, bounds=case.bounds
    )
    return {
        "compressor": case.compressor.to_dict(),
        "topology": case.topology.to_dict(),
        "world_size": case.world_size,
        "numel": case.numel,
        "bounds": case.bounds and list(case.bounds),
        "call": asdict(case.call),
        "statistics": to_hex(GIVEN[0]),
        "payloads": [
            {**asdict(message), "bytes": payload.hex()}
            for (message, _), payload in sorted(outcome.payloads.items(), key=lambda i: str(i[0]))
        ],
        "result": to_hex(outcome.outs[0]),
    }


def to_hex(values: Tensor) -> str:
    """Write float32[...] as little-endian bytes."""
    return values.numpy().astype("<f4").tobytes().hex()


def read(text: str, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=dtype)


@pytest.fixture(params=CASES)
def golden(request):
    """What the file of a case holds."""
    return json.loads((FOLDER / f"{request.param}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_the_same_entries_give_the_same_bytes(name):
    golden = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    now = run(CASES[name])
    for field in golden:
        assert now[field] == golden[field], f"{field} changed"


def test_old_payloads_are_read(golden):
    """With nothing but the file: configuration, statistics and finished chunks."""
    compressor = compressor_registry.read(golden["compressor"])
    schedule = Schedule(topology_registry.read(golden["topology"]), golden["world_size"])
    bounds = golden["bounds"] and tuple(golden["bounds"])
    layout = Layout(golden["numel"], golden["world_size"], 256, bounds)
    statistics = read(golden["statistics"], torch.float32)
    encoding = compressor.encode(statistics, layout, schedule, Call(**golden["call"]), State())
    out = torch.zeros(golden["numel"])
    work = encoding.load(out, 0, out)

    everything, decoded = range(encoding.positions), 0
    for entry in golden["payloads"]:
        payload = read(entry.pop("bytes"), torch.uint8) if entry["bytes"] else torch.empty(0).byte()
        message = Message(**{k: v for k, v in entry.items() if k != "bytes"})
        assert payload.numel() == encoding.payload_bytes(message, everything)
        if message == schedule.gather_message(message.chunk):
            encoding.decompress(payload, work, message, everything)
            decoded += 1
    encoding.store(work, out)

    assert decoded == golden["world_size"]
    assert to_hex(out) == golden["result"]


def test_every_golden_file_has_a_case():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)


def test_the_cases_are_worth_keeping():
    """All widths occur, zeros and NaN too, and results are near the exact sums."""
    results = {name: read(run(case)["result"], torch.float32) for name, case in CASES.items()}
    for name, case in CASES.items():
        exact = case.gradients().double().sum(0) / case.call.divisor
        finite = exact.isfinite() & results[name].isfinite()
        error = (results[name].double() - exact)[finite].square().sum()
        assert 0 < error / exact[finite].square().sum() < 0.1
    extreme = results["extreme-values"]
    assert extreme[4 * 256 : 5 * 256].isnan().all()
    assert extreme.isfinite().sum() == 5 * 256
    assert (extreme[2 * 256 : 3 * 256] == 0).all()


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        path = FOLDER / f"{name}.json"
        if path.exists():
            print(f"{path.name} is there and stays as it is")
        else:
            path.write_text(json.dumps(run(case), indent=1) + "\n", "utf-8")
            print(f"{path.name} is new")
