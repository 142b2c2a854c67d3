"""Bytes are forever: THC payloads that earlier versions wrote are read, and written again.

``tests/golden/thc/*.json`` are what ``tests/golden/dynamiq`` are, and are made alike:

    python -m tests.compressors.test_thc_golden
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq import Butterfly, Ring, THCCompressor
from dynamiq.core.compressor import State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry, topology_registry
from dynamiq.core.topology import Schedule
from tests.compressors.test_dynamiq_golden import Case, read, to_hex
from tests.contracts import compressor as contract

FOLDER = Path(__file__).parents[1] / "golden" / "thc"
SIZES = (2.0**100, 1.0, 0.0, 2.0**-130)

CASES = {
    "uniform": Case(THCCompressor.uniform(), Ring(), 3, 1300, Call(1, 7, 3)),
    "table": Case(THCCompressor.table(), Butterfly(), 5, 1000, Call(2**40, 0)),
    "wide-with-bounds": Case(
        THCCompressor.uniform(9, clamp=3.2972),
        Ring(),
        3,
        1300,
        Call(-5, 2**31, 3),
        bounds=(0, 300, 300, 1300),
    ),
    "extreme-values": Case(THCCompressor.uniform(5), Ring(), 2, 1024, Call(0, 1, 2), scales=SIZES),
}

GIVEN: list[Tensor] = []


class Recorded(THCCompressor):
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


def load(name: str) -> dict[str, Any]:
    """Return what the file of a case holds."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_the_same_entries_give_the_same_bytes(name):
    golden, now = load(name), run(CASES[name])
    for field in golden:
        assert now[field] == golden[field], f"{field} changed"


@pytest.mark.parametrize("name", CASES)
def test_old_payloads_are_read(name):
    """With nothing but the file: configuration, statistics and finished chunks."""
    golden = load(name)
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
        message = Message(**{key: value for key, value in entry.items() if key != "bytes"})
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
    """Results are near the exact sums."""
    for name, case in CASES.items():
        exact = case.gradients().double().sum(0) / case.call.divisor
        error = read(load(name)["result"], torch.float32).double() - exact
        assert 0 < error.square().sum() / exact.square().sum() < 0.05


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        path = FOLDER / f"{name}.json"
        if path.exists():
            print(f"{path.name} is there and stays as it is")
        else:
            path.write_text(json.dumps(run(case), indent=1) + "\n", "utf-8")
            print(f"{path.name} is new")
