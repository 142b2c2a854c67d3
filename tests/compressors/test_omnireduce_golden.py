"""Bytes are forever: payloads of OmniReduce that earlier versions wrote.

As :mod:`tests.compressors.test_dynamiq_golden`, with ``tests/golden/omnireduce/*.json``. To add a
case, name it in CASES and run

    python -m tests.compressors.test_omnireduce_golden
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamiq import Butterfly, Direct, OmniReduceCompressor, Ring
from dynamiq.core.compressor import State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry, topology_registry
from dynamiq.core.topology import Schedule
from tests.compressors.test_dynamiq_golden import Case, read, to_hex
from tests.contracts import compressor as contract

FOLDER = Path(__file__).parents[1] / "golden" / "omnireduce"
WITH_ZEROS = (1.0, 0.0, 2.0**-9, 0.0, 0.0, 2.0**-3)

CASES = {
    "lossless": Case(OmniReduceCompressor(), Ring(), 3, 1300, Call(1, 7, 3), scales=WITH_ZEROS),
    "topk-with-bounds": Case(
        OmniReduceCompressor(mode="topk", payload="fp32", bit_budget=12),
        Butterfly(),
        4,
        2100,
        Call(2**40, 0),
        bounds=(0, 300, 300, 1100, 2100),
    ),
    "topk": Case(
        OmniReduceCompressor(mode="topk", bit_budget=5), Direct(), 3, 4000, Call(-5, 2**31, 3)
    ),
}

GIVEN: list[torch.Tensor] = []


class Recorded(OmniReduceCompressor):
    """Keeps the statistics that it was given."""

    def encode(self, statistics: torch.Tensor | None, *arguments: Any) -> Any:
        GIVEN.append(statistics)
        return super().encode(statistics, *arguments)


def run(case: Case) -> dict[str, Any]:
    """Return what a golden file holds; ``share`` is the state after the call."""
    GIVEN.clear()
    outcome = contract.all_reduce(
        Recorded.model_validate(case.compressor.to_dict()),
        case.topology,
        case.gradients(),
        call=case.call,
        bounds=case.bounds,
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
        "share": outcome.states[0].shared["share"].item() if outcome.states[0].shared else None,
    }


def golden(name: str) -> dict[str, Any]:
    """Return what the file of a case holds."""
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_the_same_entries_give_the_same_bytes(name):
    now = run(CASES[name])
    for field, value in golden(name).items():
        assert now[field] == value, f"{field} changed"


@pytest.mark.parametrize("name", CASES)
def test_old_payloads_are_read(name):
    """With nothing but the file: configuration, statistics and finished chunks."""
    old = golden(name)
    compressor = compressor_registry.read(old["compressor"])
    schedule = Schedule(topology_registry.read(old["topology"]), old["world_size"])
    bounds = old["bounds"] and tuple(old["bounds"])
    layout = Layout(old["numel"], old["world_size"], 256, bounds)
    statistics = read(old["statistics"], torch.float32)
    encoding = compressor.encode(statistics, layout, schedule, Call(**old["call"]), State())
    out = torch.full((old["numel"],), torch.nan)
    work = encoding.load(torch.zeros(old["numel"]), 0, out)

    everything = range(encoding.positions)
    for entry in old["payloads"]:
        payload = bytes.fromhex(entry.pop("bytes"))
        message = Message(**entry)
        assert len(payload) == encoding.payload_bytes(message, everything)
        if message == schedule.gather_message(message.chunk):
            wire = torch.tensor(list(payload), dtype=torch.uint8)
            encoding.decompress(wire, work, message, everything)
    encoding.store(work, out)
    assert to_hex(out) == old["result"]


def test_every_golden_file_has_a_case():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)


def test_the_cases_are_worth_keeping():
    """Some blocks are sent and some are not, and what is sent is near the exact sums."""
    for name, case in CASES.items():
        result = read(golden(name)["result"], torch.float32)
        exact = case.gradients().double().sum(0) / case.call.divisor
        sent = result != 0
        assert 0 < sent.count_nonzero() < case.numel
        error = (result.double() - exact)[sent].square().sum()
        assert error / exact[sent].square().sum() < 1e-4


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        path = FOLDER / f"{name}.json"
        if path.exists():
            print(f"{path.name} is there and stays as it is")
        else:
            path.write_text(json.dumps(run(case), indent=1) + "\n", "utf-8")
            print(f"{path.name} is new")
