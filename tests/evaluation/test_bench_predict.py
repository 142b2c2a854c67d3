"""Predicted beside measured steps: what errors and choices are, and what the command refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiq import Ring, Uncompressed
from dynamiq.planner.profiles.hardware import (
    CodecCost,
    HardwareProfile,
    Link,
    OperationCost,
    Processor,
)
from dynamiq.planner.profiles.workload import Gradient, WorkloadProfile
from evaluation.bench import predict, predictions
from evaluation.bench.__main__ import app
from evaluation.bench.planned import PlannedFindings, PlannedRow, PlannedTask, read_findings
from evaluation.bench.predictions import Cell
from evaluation.bench.records import Existing, Measured, Method, Ours, TrainingTask
from evaluation.rows import append_row

FP32, BF16 = Uncompressed("fp32"), Uncompressed("bf16")
FREE = OperationCost(fixed_s=0, entry_s=0)
OPERATIONS = set(CodecCost.model_fields) - {"compressor"}


def ours(compressor: Uncompressed) -> Ours:
    return Ours(name=compressor.format.upper(), compressor=compressor, topology=Ring())


def measured(method: Method, *times_s: float) -> Measured:
    return Measured(
        method=method,
        times_s=times_s,
        sent_bytes=(1e6, 1e6),
        codec_s=0.1,
        wire_s=0.2,
        cpu_s=0.3,
        compressed=None,
    )


def cell(compressor: Uncompressed, measured_s: float, predicted_s: float) -> Cell:
    return Cell(measured(ours(compressor), measured_s), ours(compressor), predicted_s)


@pytest.fixture
def row() -> PlannedRow:
    """Two ranks on a link of 10 MB/s; formats cost nothing, and 4 MB are ready after a second."""
    codecs = [CodecCost(compressor=c, **dict.fromkeys(OPERATIONS, FREE)) for c in (FP32, BF16)]
    found = PlannedFindings(
        hardware=HardwareProfile(
            name="two",
            source="a test",
            world_size=2,
            network=Link(latency_s=0, bandwidth_bytes_per_s=1e7),
            processor=Processor(device="cpu", codecs=tuple(codecs)),
        ),
        workload=WorkloadProfile(
            name="w",
            source="a test",
            step_s=1.2,
            backward_s=1.0,
            gradients=(Gradient(numel=1_000_000, ready_s=1.0),),
        ),
        measured=(
            measured(Existing(name="none"), 2.4, 2.4, 9.0),
            measured(ours(FP32), 2.8, 2.8, 2.8),
            measured(ours(BF16), 2.9, 3.25, 3.3),
        ),
    )
    training = TrainingTask(
        world_size=2,
        rate_mbit=80,
        methods=tuple(m.method for m in found.measured),
        rounds=1,
        steps=3,
        workload="language_model",
    )
    return PlannedRow(
        settings=PlannedTask(world_size=2, training=training),
        command="scripts/bench predict",
        found=found,
        link_mbit=76.0,
        machine_cores=1.5,
        environment={"cpus": 2, "processor": "a processor", "packages": {"torch": "2"}},
        commit="abc",
    )


def test_the_timeline_is_stretched_to_the_step_that_was_measured_in_turn(row: PlannedRow) -> None:
    stretched = predictions.workload(row.found)
    assert stretched.step_s == 2.4
    assert stretched.backward_s == pytest.approx(2.0)
    assert stretched.gradients[0].ready_s == pytest.approx(2.0)


def test_cells_are_predicted_from_the_profiles_of_their_run(row: PlannedRow) -> None:
    fp32, bf16 = predictions.cells(row)
    # A ring of two sends every entry once: 4 MB, then 2 MB.
    assert fp32.predicted_s == pytest.approx(2.4 + 0.4, rel=1e-3)
    assert bf16.predicted_s == pytest.approx(2.4 + 0.2, rel=1e-3)
    assert fp32.error == pytest.approx(0, abs=1e-3)
    assert bf16.error == pytest.approx(2.6 / 3.25 - 1, abs=1e-3)


def test_a_choice_costs_what_it_measured(row: PlannedRow) -> None:
    made = predictions.choice(predictions.cells(row))
    assert made.chosen.method.compressor == BF16
    assert made.best.method.compressor == FP32
    assert made.loss == pytest.approx(3.25 / 2.8 - 1)


@pytest.mark.parametrize(("gain", "expected"), [(0.04, FP32), (0.06, BF16)])
def test_compression_has_to_be_worth_it(gain: float, expected: Uncompressed) -> None:
    found = [cell(FP32, 1.0, 1.0), cell(BF16, 1.0, 1 - gain)]
    assert predictions.choice(found).chosen.method.compressor == expected


def test_errors_of_many_cells() -> None:
    found = [cell(FP32, 1.0, 1 + sign * e / 10) for e, sign in enumerate((1, -1) * 5)]
    assert predictions.median_error(found) == pytest.approx(0.45)
    assert predictions.quantile_error(found, 0.9) == pytest.approx(0.8)
    assert predictions.quantile_error(found, 1.0) == pytest.approx(0.9)
    assert predictions.quantile_error(found[:1], 0.9) == 0


def test_the_page_is_made_of_rows(row: PlannedRow, tmp_path: Path) -> None:
    append_row(tmp_path / "rows.jsonl", row)
    page = tmp_path / "planner.md"
    arguments = ["predict-page", str(tmp_path / "rows.jsonl"), "--output", str(page)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    text = page.read_text()
    assert "| FP32, ring | 2800 | 2800 to 2800 | 2800 | +0.0% | 400 | 400 |" in text
    assert "| no communication | 2400 | 2400 to 9000 |  |  | 0 |  |" in text
    assert "| 80 | 2 | 10.0% | 20.0% | BF16, ring | FP32, ring | 16.1% |" in text
    assert "Over all 2 cells the median error is 10.0%; 100% are within 25%." in text


def test_a_page_needs_rows(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["predict-page", str(tmp_path / "none.jsonl")])
    assert (ended.exit_code, ended.stderr) == (2, "error: no rows: do some runs first\n")


def test_findings_cross_the_process_as_they_are(row: PlannedRow) -> None:
    assert read_findings(row.found.model_dump_json()) == row.found


def test_every_format_runs_on_every_topology() -> None:
    labels = [m.label for m in predict.methods((3, 5), ("ring", "butterfly"))]
    assert labels[:3] == ["no communication", "Gloo FP32", "FP32, ring"]
    assert labels[-1] == "DynamiQ 5 bits, butterfly"
    assert len(labels) == len(set(labels)) == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "dreams"), "--workload dreams: there are language_model"),
        (("--bits", "0.1"), "a budget of 0.1 bits"),
        (("--bits", "x"), "--bits x: not a list"),
        (("--topologies", "star"), "star"),
        (("--rates", "0"), "rate_mbit must be at least 0.1"),
        (("--steps", "0"), "steps: "),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: tuple[str, ...], message: str) -> None:
    ended = CliRunner().invoke(app, ["predict", *arguments])
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.soak
@pytest.mark.network
@pytest.mark.usefixtures("needs_namespaces", "needs_demo_packages")
def test_a_small_run(tmp_path: Path) -> None:
    arguments = ["predict", "--hosts", "2", "--rates", "200", "--bits", "5", "--topologies", "ring"]
    arguments += ["--rounds", "1", "--steps", "1", "--output", str(tmp_path)]
    ended = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert ended.exit_code == 0
    assert "DynamiQ 5 bits, ring" in ended.stdout
