"""``dynamiq roofline``: its words, its numbers and its exit codes."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiq.cli import roofline as command
from dynamiq.cli.main import app
from dynamiq.core.errors import KernelError
from dynamiq.kernels.registry import kernels_of
from dynamiq.roofline.machine import H200
from dynamiq.roofline.measured import read
from dynamiq.roofline.row import Row

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

    def pretend(machine, kernel, entry_format, width):
        cases.append((machine.name, kernel, entry_format, width))
        return Row(
            *(kernel, entry_format, width, None, machine.name, "NVRTC", True, None, None),
            *(machine.entries_per_s(5.0, 100.0), 5.0, machine.memory_bytes_per_s, 100.0),
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
    assert "[default: 2, 4, 8]" in text
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
    result = run(RUN, "--predict", "H200", "--width", 4)
    text = words(result.stdout)

    assert result.exit_code == 0
    assert predicted == [
        ("H200", spec.name, "FP32", 4 if spec.has_widths else None)
        for spec in kernels_of("supergroups")
    ]
    assert len(re.findall("^predicted ", result.stdout, re.MULTILINE)) == len(predicted)
    assert f"predicted: H200, never run; {words(H200.source)}" in text


def test_formats_and_widths_are_chosen(predicted):
    result = run("--predict", "H200", "--format", "bf16", "--width", 3, "--json")
    assert result.exit_code == 0
    assert {case[2] for case in predicted} == {"BF16"}
    assert {case[3] for case in predicted} == {None, 3}
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


def test_a_prediction_is_the_tighter_bound_of_compiled_code():
    result = run("--predict", "H200", "--width", 4, "--json")
    assert result.exit_code == 0, result.stderr
    rows = {row["kernel"]: row for row in json.loads(result.stdout)}
    for row in rows.values():
        by_memory = H200.memory_bytes_per_s / row["bytes_per_entry"]
        by_instructions = H200.instructions_per_s / row["instructions_per_entry"]
        assert row["entries_per_s"] == min(by_memory, by_instructions)
        assert row["binds"] == ("memory" if by_memory <= by_instructions else "compute")
        assert row["build"] == "NVRTC, sm_90a"
