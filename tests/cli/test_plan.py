"""``dynamiq plan``: its words, its numbers and its exit codes."""

import re

import pytest
from typer.testing import CliRunner

from dynamiq import planner
from dynamiq.cli.main import app
from dynamiq.planner import files
from dynamiq.planner.profiles.typical import SPECTRUM
from dynamiq.planner.search import Objective, Search
from tests.planner.clusters import cluster, training

FLAGS = (
    "--parameters",
    "6M",
    "--world-size",
    "4",
    "--bandwidth",
    "1Gbit/s",
    "--latency",
    "50us",
    "--backward",
    "100ms",
)


def run(*arguments):
    environment = {"COLUMNS": "100", "NO_COLOR": "1"}
    return CliRunner(env=environment).invoke(app, ["plan", *map(str, arguments)])


def words(text):
    """Return text without frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def changed(name, *values):
    """Return the flags with another value, or without one."""
    at = FLAGS.index(name)
    return (*FLAGS[:at], *((name, *values) if values else ()), *FLAGS[at + 2 :])


def test_help_says_what_is_chosen_and_from_what():
    result = run("--help")
    text = words(result.stdout)
    assert result.exit_code == 0
    assert (
        "Choose compressor, topology, bits and bucket size, or advise against compressing." in text
    )
    for option in (
        "--profile",
        "--workload",
        "--max-error",
        "--max-step-time",
        "--explain",
        "--plot",
    ):
        assert option in text
    assert "ethernet-25g" in text
    assert "[default: 0.005]" in text
    overview = words(CliRunner().invoke(app, ["--help"]).stdout)
    assert "plan Choose compressor, topology, bits and bucket size" in overview


def test_flags_make_a_table_bars_and_a_sentence():
    result = run(*FLAGS, "--explain")
    text = words(result.stdout)
    assert result.exit_code == 0, result.stderr
    assert "6,000,000 parameters on 4 A100" in text
    assert "→" in text
    assert "█ compute ▓ slowed by encoding ░ waiting for communication" in text
    assert "communication not hidden" in text
    assert "Use " in text
    assert "times as fast, with a vNMSE of " in text
    assert "Assumed: errors are those of the gradients of a small language model" in text
    assert "Assumed: links reach the rate given" in text


def test_json_is_the_plan_that_the_library_makes(tmp_path):
    result = run(*FLAGS, "--json", "--step", "200ms")
    assert result.exit_code == 0, result.stderr
    (tmp_path / "plan.json").write_text(result.stdout)
    plan = planner.load(tmp_path / "plan.json")
    assert plan.compress
    assert plan.baseline.time.compute_s == pytest.approx(0.2)


def test_measured_files_are_planned_for(tmp_path):
    hardware, work = cluster(4, bytes_per_s=1e8), training((3_000_000, 0.3), (900_000, 1.0))
    files.write(tmp_path / "hardware.json", hardware)
    files.write(tmp_path / "work.json", work)
    arguments = ("--profile", tmp_path / "hardware.json", "--workload", tmp_path / "work.json")
    result = run(*arguments, "--json", "--max-error", "1")
    assert result.exit_code == 0, result.stderr
    expected = planner.make(Search(hardware, work, SPECTRUM), Objective(max_vnmse=1.0))
    found = files.parse(result.stdout, planner.Plan, "stdout")
    assert found.chosen == expected.chosen
    assert found.alternatives == expected.alternatives
    assert len(found.assumptions) == 1, "links were measured"


def test_a_picture_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    result = run(*FLAGS, "--plot", tmp_path / "plan.svg", "--pareto")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "plan.svg").read_text().count("<svg") == 1
    assert "none is both faster and better" in result.stdout
    assert "communication not hidden" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a plan needs --world-size, or --profile FILE.json"),
        (
            changed("--parameters"),
            "a plan needs --parameters and --backward, or --workload FILE.json",
        ),
        (changed("--bandwidth"), "a plan needs --bandwidth or --network, or --profile FILE.json"),
        (
            changed("--bandwidth", "25Gbps"),
            "'25Gbps' may mean bits or bytes; write 25Gbit/s, or 25GB/s",
        ),
        (changed("--bandwidth", "25 furlongs"), "has the unknown unit 'furlongs'"),
        (changed("--bandwidth", "-1Gbit/s"), "a bandwidth cannot be negative, got '-1Gbit/s'"),
        (changed("--bandwidth", "0Gbit/s"), "a bandwidth must be greater than 0"),
        (changed("--bandwidth", "nanGbit/s"), "a bandwidth must be a finite number"),
        (changed("--latency", "20"), "a latency, '20', has no unit"),
        (changed("--world-size", "1"), "a plan needs at least 2 ranks, got 1"),
        (changed("--world-size", "many"), "a number is a number such as 350M"),
        ((*FLAGS, "--ranks-per-node", "3"), "4 ranks cannot be split into machines of 3"),
        ((*FLAGS, "--gpu", "K80"), "no GPU 'K80'; there are A100, H100, H200"),
        ((*FLAGS, "--node", "isa"), "no link 'isa'; there are nvlink-a100"),
        ((*FLAGS, "--network", "ethernet-25g"), "describe the same link; give one of them"),
        (
            (*changed("--bandwidth"), "--network", "arcnet"),
            "no network 'arcnet'; there are ethernet-1g",
        ),
        ((*FLAGS, "--step", "50ms"), "a step of 50ms cannot hold a backward pass of 100ms"),
        ((*FLAGS, "--dtype", "int8"), "dtype='int8'"),
        ((*FLAGS, "--max-step-time", "1ms"), "no configuration has a step of at most 1.00 ms; the"),
        ((*FLAGS, "--threshold", "200%"), "a share is at most 100%, got '200%'"),
        ((*FLAGS, "--plot", "plan.gif"), "a plot is written as .png, .svg, .pdf, got 'plan.gif'"),
        ((*FLAGS, "--plot", "nowhere/plan.svg"), "there is no folder nowhere"),
        (("--profile", "none.json"), "none.json cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
