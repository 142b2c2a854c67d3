"""Bytes are forever, of the MX formats: as tests/compressors/test_dynamiq_golden.py says.

``tests/golden/mx/*.json`` hold a configuration, the reduced statistics if there are any, every
payload of one call, and its result. To add a case, name it in CASES and run

    python -m tests.compressors.test_mx_golden

which writes the files that are missing and never touches one that is there.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamiq import Butterfly, MXCompressor, Ring
from dynamiq.core.compressor import State
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.registry import compressor_registry, topology_registry
from dynamiq.core.topology import Schedule
from tests.compressors.test_dynamiq_golden import EXTREME, Case, read, to_hex
from tests.contracts import compressor as contract

FOLDER = Path(__file__).parents[1] / "golden" / "mx"

CASES = {
    "fp8-e4m3": Case(MXCompressor(), Ring(), 3, 700, Call(1, 7, 3)),
    "fp8-e5m2": Case(
        MXCompressor("mxfp8_e5m2", scale_rule="ceil", rounding="stochastic"),
        Butterfly(),
        4,
        700,
        Call(2**40, 0),
    ),
    "fp6-e3m2": Case(
        MXCompressor("mxfp6_e3m2", rounding="prescaled"),
        Ring(),
        3,
        700,
        Call(-5, 2**31),
        bounds=(0, 300, 300, 700),
    ),
    "fp6-e2m3": Case(
        MXCompressor("mxfp6_e2m3", scale_rule="ceil", scale_scope="shared"),
        Butterfly(),
        5,
        700,
        Call(3, 6, 5),
    ),
    "fp4-e2m1": Case(MXCompressor("mxfp4_e2m1", rounding="prescaled"), Ring(), 2, 700, Call(3, 6)),
    "extreme-values": Case(MXCompressor(), Butterfly(), 2, 1536, Call(0, 1, 2), scales=EXTREME),
}

GIVEN: list[Tensor | None] = []


class Recorded(MXCompressor):
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
        "statistics": None if GIVEN[0] is None else to_hex(GIVEN[0]),
        "payloads": [
            {**asdict(message), "bytes": payload.hex()}
            for (message, _), payload in sorted(outcome.payloads.items(), key=lambda i: str(i[0]))
        ],
        "result": to_hex(outcome.outs[0]),
    }


def golden(name: str) -> dict[str, Any]:
    held: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return held


@pytest.mark.parametrize("name", CASES)
def test_the_same_entries_give_the_same_bytes(name):
    now = run(CASES[name])
    for field, value in golden(name).items():
        assert now[field] == value, f"{field} changed"


@pytest.mark.parametrize("name", CASES)
def test_old_payloads_are_read(name):
    """With nothing but the file: configuration, statistics and finished chunks."""
    held = golden(name)
    compressor = compressor_registry.read(held["compressor"])
    schedule = Schedule(topology_registry.read(held["topology"]), held["world_size"])
    bounds = held["bounds"] and tuple(held["bounds"])
    layout = Layout(held["numel"], held["world_size"], 256, bounds)
    statistics = held["statistics"] and read(held["statistics"], torch.float32)
    encoding = compressor.encode(statistics, layout, schedule, Call(**held["call"]), State())
    out = torch.zeros(held["numel"])
    work = encoding.load(out, 0, out)

    everything, decoded = range(encoding.positions), 0
    for entry in held["payloads"]:
        payload = read(entry.pop("bytes"), torch.uint8) if entry["bytes"] else torch.empty(0).byte()
        message = Message(**{k: v for k, v in entry.items() if k != "bytes"})
        assert payload.numel() == encoding.payload_bytes(message, everything)
        if message == schedule.gather_message(message.chunk):
            encoding.decompress(payload.clone(), work, message, everything)
            decoded += 1
    encoding.store(work, out)

    assert decoded == held["world_size"]
    assert to_hex(out) == held["result"]


def test_every_golden_file_has_a_case():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(CASES)


def test_the_cases_are_worth_keeping():
    """Results are near the exact sums; NaN stays in its blocks of 32."""
    for name, case in CASES.items():
        result = read(run(case)["result"], torch.float32)
        exact = case.gradients().double().sum(0) / case.call.divisor
        finite = exact.isfinite() & result.isfinite()
        error = (result.double() - exact)[finite].square().sum()
        assert 0 < error / exact[finite].square().sum() < 0.1
        if name == "extreme-values":
            assert torch.equal(result.isnan(), exact.isnan())
            assert result.isfinite().sum() == 5 * 256
            assert (result[2 * 256 : 3 * 256] == 0).all()


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, case in CASES.items():
        path = FOLDER / f"{name}.json"
        if path.exists():
            print(f"{path.name} is there and stays as it is")
        else:
            path.write_text(json.dumps(run(case), indent=1) + "\n", "utf-8")
            print(f"{path.name} is new")
