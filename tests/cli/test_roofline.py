"""``dynamiq roofline``: its words, its numbers and its exit codes."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiq.cli import roofline as command
from dynamiq.cli.main import app
from dynamiq.core.errors import KernelError
from dynamiq.kernels.mx.wire import ELEMENTS
from dynamiq.kernels.registry import kernels_of
from dynamiq.roofline.case import Case
from dynamiq.roofline.families import traffic
from dynamiq.roofline.machine import H200
from dynamiq.roofline.measured import read
from dynamiq.roofline.row import MEMORY_BOUND, Row

RUN = Path(__file__).parents[1] / "data" / "kernel_benchmarks.json"


def run(*arguments):
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    return CliRunner(env=environment).invoke(app, ["roofline", *map(str, arguments)])


def words(text):
    """Return text without frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.fixture
def predicted(monkeypatch):
    """What would be compiled and counted, without compiling it."""
    cases = []

    def pretend(machine, case):
        cases.append((machine.name, case))
        return Row(
            *(case.kernel, case.format, case.width, None),
            *(machine.name, "NVRTC", True, None, None),
            *(machine.entries_per_s(5.0, 100.0), 5.0, machine.memory_bytes_per_s, 100.0),
            case.operands,
        )

    monkeypatch.setattr(command, "predict", pretend)
    return cases


def test_help_says_what_is_measured_and_what_is_predicted():
    result = run("--help")
    text = words(result.stdout)

    assert result.exit_code == 0
    assert "FILEs hold what was measured. Predictions need no GPU" in text
    assert "[FILE]..." in text
    assert "tests/benchmarks/test_kernels.py" in text
    assert "--predict GPU Add bounds for a GPU that need not be here: H200." in text
    assert "[default: (2, 4, 8)]" in text
    assert "[default: supergroups, mx, hadamard]" in text
    assert "The family allocation has no rows" in text
    assert "--json" in text
    overview = CliRunner().invoke(app, ["--help"]).stdout
    assert "roofline Show entries, bytes and instructions" in words(overview)


def test_json_holds_every_row_and_what_follows_from_it():
    result = run(RUN, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == [row.as_dict() for row in read(RUN)]


def test_the_table_holds_the_same_numbers():
    result = run(RUN)
    (row,) = [row for row in read(RUN) if row.kernel == "compress"]
    lines = result.stdout.splitlines()
    first = [line.strip() for line in lines].index("compress")
    cells = next(line.split() for line in lines[first:] if line.startswith("measured"))

    assert cells == [
        *("measured", "FP32", "4", "stoch.", f"{row.entries_per_s / 1e6:.0f}"),
        *(f"{row.bytes_per_entry:.2f}", f"{row.bytes_per_s / 1e9:.1f}"),
        *(f"{row.share_of_copy:.0%}", f"{row.instructions_per_byte:.2f}", row.binds),
    ]
    text = words(result.stdout)
    assert f"measured: {row.machine}; {row.build}; threads: 1" in text
    assert "predicted" not in text.replace("predicted ones", "")


def test_predictions_are_marked_and_cite_the_datasheet(predicted):
    result = run(RUN, "--predict", "H200", "--width", 4, "--family", "supergroups")
    text = words(result.stdout)

    assert result.exit_code == 0
    assert predicted == [
        ("H200", Case(spec.name, "FP32", 4 if spec.has_widths else None))
        for spec in kernels_of("supergroups")
    ]
    assert len(re.findall("^predicted ", result.stdout, re.MULTILINE)) == len(predicted)
    assert f"predicted: H200, never run; {words(H200.source)}" in text


def test_all_families_are_predicted_unless_some_are_chosen(predicted):
    assert run("--predict", "h200").exit_code == 0
    assert {name for name, _ in predicted} == {"H200"}
    all_kernels = {case.kernel for _, case in predicted}
    assert all_kernels == {
        spec.name for family in ("supergroups", "mx", "hadamard") for spec in kernels_of(family)
    }
    predicted.clear()
    result = run("--predict", "H200", "--family", "mx")
    assert {case.kernel for _, case in predicted} == {spec.name for spec in kernels_of("mx")}
    cells = [line.split() for line in result.stdout.splitlines() if line.startswith("predicted ")]
    assert [c[2] for c in cells if "FP32" in c] == [case.operands for _, case in predicted]
    assert {case.operands for _, case in predicted} == set(ELEMENTS)


def test_formats_and_widths_are_chosen(predicted):
    result = run("--predict", "H200", "--format", "bf16", "--width", 3, "--json")
    assert result.exit_code == 0
    assert {case.format for _, case in predicted} - {None} == {"BF16"}
    assert {case.width for _, case in predicted} == {None, 3}
    assert not {spec.name for spec in kernels_of("mx")} & {case.kernel for _, case in predicted}
    assert all(row["predicted"] for row in json.loads(result.stdout))


def test_the_table_fits_into_80_columns(predicted):
    lines = run(RUN, "--predict", "H200").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "give a FILE of measurements, or --predict GPU, or both"),
        (["--predict", "H300"], "--predict: 'H300' is unknown; there are H200"),
        (["--predict", "H200", "--format", "fp8"], "--format: 'FP8' is unknown; there are FP32"),
        (["--predict", "H200", "--family", "fill"], "--family: 'fill' is unknown; there are super"),
        (
            ["--predict", "H200", "--family", "mx", "--format", "bf16"],
            "--format: no kernel of mx is written for entries in BF16",
        ),
        (
            ["--predict", "H200", "--family", "mx", "--width", 4],
            "--width: kernels of mx are not built for a width; add --family supergroups",
        ),
        (["--predict", "H200", "--width", 11], "--width: 11 is unknown; there are 1, 2,"),
    ],
)
def test_wrong_arguments_exit_with_2_and_list_what_there_is(predicted, arguments, complaint):
    result = run(*arguments)
    assert result.exit_code == 2
    assert complaint in words(result.stderr)
    assert not predicted


def test_files_that_cannot_be_read_exit_with_1(tmp_path):
    result = run(tmp_path / "none.json")
    assert result.exit_code == 1
    assert "none.json cannot be read" in words(result.stderr)
    assert "--benchmark-json kernels.json" in words(result.stderr)


def test_what_cannot_be_compiled_exits_with_1(monkeypatch):
    def refuse(*_):
        raise KernelError("compiling for a GPU needs NVRTC")

    monkeypatch.setattr(command, "predict", refuse)
    result = run("--predict", "H200")
    assert result.exit_code == 1
    assert result.stderr.strip().endswith("error: compiling for a GPU needs NVRTC")


@pytest.mark.parametrize(
    "family", ["supergroups", "mx", pytest.param("hadamard", marks=pytest.mark.soak)]
)
def test_a_prediction_is_the_tighter_bound_of_compiled_code(family):
    width = ["--width", 4] if family == "supergroups" else []
    result = run("--predict", "H200", "--family", family, *width, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)
    assert {row["kernel"] for row in rows} == {spec.name for spec in kernels_of(family)}
    for row in rows:
        by_memory = H200.memory_bytes_per_s / row["bytes_per_entry"]
        by_instructions = H200.instructions_per_s / row["instructions_per_entry"]
        assert row["entries_per_s"] == min(by_memory, by_instructions)
        assert row["binds"] == ("memory" if row["share_of_copy"] >= MEMORY_BOUND else "compute")
        assert row["build"] == "NVRTC, sm_90a"
        case = Case(row["kernel"], row["format"], row["width"], row["operands"])
        moved = traffic(case, 512).moved_bytes
        assert row["bytes_per_entry"] == moved / (512 * 256)
