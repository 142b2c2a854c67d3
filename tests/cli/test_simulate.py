"""``dynamiq simulate``: its words, its numbers and its exit codes."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dynamiq.cli import simulate as command
from dynamiq.cli.main import app
from dynamiq.compressors import DynamiQCompressor
from dynamiq.core.metrics import measure_error
from dynamiq.simulation.ablation import steps
from dynamiq.simulation.limit import rate_distortion_limit
from dynamiq.simulation.measurement import Effort
from dynamiq.simulation.row import Row
from dynamiq.topologies import Butterfly, Ring

SAMPLE = Path(__file__).parents[1] / "data" / "smollm2_gradients.safetensors"
ENTRIES = 8000
SMALL = (SAMPLE, "--entries", ENTRIES, "--seeds", 2)


def run(*arguments):
    environment = {"COLUMNS": "80", "NO_COLOR": "1"}
    return CliRunner(env=environment).invoke(app, ["simulate", *map(str, arguments)])


def words(text):
    """Return text without frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


def document(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_help_says_what_is_simulated():
    result = run("--help")
    text = words(result.stdout)

    assert result.exit_code == 0
    assert "The simulation runs the code of a real call, all ranks in one thread" in text
    assert ".safetensors or .pt with a tensor [ranks, ...], or synthetic:mixture." in text
    assert "[default: bf16, paper-stochastic, paper, default]" in text
    assert "[default: 5; --ablation: 4; --sweep: 3 to 8 in halves]" in text
    overview = CliRunner().invoke(app, ["--help"]).stdout
    assert "simulate Show error, bias and bits of compressors on GRADIENTS" in words(overview)


def test_rows_are_real_calls_by_compressor_topology_and_budget(gradients):
    names = ("--compressor", "paper", "--compressor", "bf16", "--option", "energy=raw")
    result = run(*SMALL, *names)
    assert result.exit_code == 2
    assert "bf16 has no option 'energy'; there are format" in words(result.stderr)

    paper = (*names[:2], *names[4:])
    found = document(*SMALL, *paper, "--bits", 4, "--bits", 6, "--world-size", 5)
    x = gradients[:5, :ENTRIES].contiguous()
    expected = [(kind, bits) for kind in (Ring(), Butterfly()) for bits in (4.0, 6.0)]
    assert found["gradients"] == str(SAMPLE)
    assert len(found["rows"]) == 4
    for row, (topology, bits) in zip(found["rows"], expected, strict=True):
        compressor = DynamiQCompressor.paper(bits, energy="raw")
        errors = [measure_error(x, compressor, topology, seed=seed).vnmse for seed in range(2)]
        assert (row["compressor"], row["bit_budget"]) == ("paper", bits)
        assert (row["topology"], row["world_size"], row["entries"]) == (topology.kind, 5, ENTRIES)
        assert row["description"] == compressor.to_dict()
        assert row["vnmse"] == pytest.approx(sum(errors) / 2, rel=1e-9)
        assert len(row["hops"]) == len(topology.hops(5))
    limit = rate_distortion_limit(x.double().sum(0), [4.0, 6.0])
    assert [point["vnmse"] for point in found["rate_distortion_limit"]] == limit
    assert [point["bits"] for point in found["rate_distortion_limit"]] == [4.0, 6.0]


def test_the_table_holds_the_same_numbers():
    names = ("--compressor", "bf16", "--compressor", "default")
    arguments = (SAMPLE, "--entries", 2560, "--seeds", 2, *names, "--topology", "butterfly")
    first, second = document(*arguments)["rows"]
    text = run(*arguments).stdout
    for row in (first, second):
        (cells,) = [
            line.split()
            for line in text.splitlines()
            if re.match(rf"{row['compressor']} .*{row['bits_per_entry']:.3f}", line)
        ]
        assert cells[1] == f"{row['vnmse']:.2e}"
    assert "hops of the butterfly: default, 5 bits" in text
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]
    assert "hops of" not in run(*arguments[:-4], *arguments[-2:], "--no-hops").stdout


def test_more_ranks_are_resampled():
    arguments = ("--entries", 2560, "--seeds", 1, "--compressor", "bf16", "--topology", "ring")
    result = run(SAMPLE, *arguments, "--world-size", 12)
    assert result.exit_code == 1
    assert "holds the gradients of 8 ranks, not of 12; --resample draws" in words(result.stderr)
    (row,) = document(SAMPLE, *arguments, "--world-size", 12, "--resample")["rows"]
    (other,) = document(SAMPLE, *arguments, "--world-size", 12, "--resample", "--seed", 1)["rows"]
    assert (row["world_size"], row["entries"]) == (12, 2560)
    assert row["vnmse"] != other["vnmse"]


def test_one_chunk_of_a_spectrum():
    arguments = ("--one-chunk", "--world-size", 64, "--entries", 2560, "--seeds", 1)
    recipe = ("--compressor", "paper-stochastic", "--option", "widths=2,4,8,16")
    ring, butterfly = document("synthetic:mixture", *arguments, *recipe)["rows"]
    assert (ring["one_chunk"], ring["entries"], ring["world_size"]) == (True, 2560, 64)
    assert ring["vnmse"] > 3 * butterfly["vnmse"] > 0
    assert len(ring["hops"]) == 64
    result = run("synthetic:mixture", *arguments, "--compressor", "paper")
    assert result.exit_code == 1
    assert "correlated rounding cannot be simulated on one chunk" in words(result.stderr)


@pytest.fixture
def cases(monkeypatch):
    """What would be simulated, without simulating it."""
    measured = []

    def pretend(world, case, effort):
        measured.append((case, effort))
        bits = case.bit_budget or 16.0
        return Row(
            *(case.name, case.compressor.to_dict(), case.topology.kind, world.world_size),
            *(world.numel, False, case.bit_budget, effort.seeds, 4.0**-bits, 0.0, None, None),
            *(1.0, bits, 1e3, None, ()),
        )

    monkeypatch.setattr(command, "measure", pretend)
    return measured


def test_orders_are_asked_for(cases):
    assert run(SAMPLE, "--orders", "4", "--compressor", "bf16").exit_code == 0
    assert {effort.orders for _, effort in cases} == {4}
    refused = run("synthetic:mixture", "--one-chunk", "--orders", "2")
    assert refused.exit_code == 2
    assert "--orders permutes given ranks" in " ".join(refused.stderr.replace("│", " ").split())


def test_an_ablation_prints_every_step(cases):
    result = run(SAMPLE, "--ablation", "--topology", "ring")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    for name in steps():
        assert sum(line.startswith(name) for line in lines) == 1, name
    assert {case.name: case.compressor for case, _ in cases} == steps(4.0)
    assert {case.bit_budget for case, _ in cases} == {4.0}
    assert {effort for _, effort in cases} == {Effort(5, 2, hops=False)}

    cases.clear()
    found = document(SAMPLE, "--ablation", "--bits", 3.5, "--warm-up", 1)
    assert [row["compressor"] for row in found["rows"]] == list(steps()) * 2
    assert {case.name: case.compressor for case, _ in cases} == steps(3.5)
    assert {effort.warm_up_calls for _, effort in cases} == {1}


def test_a_sweep_is_a_table_and_a_picture(cases, tmp_path):
    names = ("--compressor", "paper-nearest", "--compressor", "bf16", "--topology", "butterfly")
    result = run(SAMPLE, "--sweep", *names, "--plot", tmp_path / "sweep.svg")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "sweep.svg").read_text().startswith("<?xml")
    bits = [3 + i / 2 for i in range(11)]
    table = [line.split() for line in result.stdout.splitlines()]
    for b in bits:
        (cells,) = [line for line in table if line[:1] == [f"{b:g}"]]
        assert cells[1:3] == [f"{4.0**-b:.2e}", "–"]
    assert [case.bit_budget for case, _ in cases] == [*bits, None]
    assert not any(effort.hops for _, effort in cases)
    found = document(SAMPLE, "--sweep", *names, "--bits", 4)
    assert len(found["rows"]) == 2
    assert [point["bits"] for point in found["rate_distortion_limit"]] == [4.0]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--compressor", "papr"], "no format is named 'papr'; there are bf16, paper,"),
        (["--topology", "star"], "no dynamiq.topologies entry has the kind 'star'"),
        (["--bits", 1], "paper-stochastic: a budget of 1.0 bits per entry cannot be met"),
        (["--option", "widths"], "an option is name=value, got 'widths'"),
        (["--ablation", "--sweep"], "--ablation and --sweep are two reports; ask for one"),
        (["--ablation", "--compressor", "paper"], "--ablation has its own compressors"),
        (["--ablation", "--option", "means=true"], "--ablation has its own compressors"),
        (["--ablation", "--bits", 4, "--bits", 5], "--ablation takes one budget, got 2"),
        (["--plot", "x.png"], "--plot draws a --sweep"),
        (["--sweep", "--plot", "x.gif"], "a plot is written as .png, .svg, .pdf, got 'x.gif'"),
        (["--sweep", "--plot", "nowhere/x.png"], "there is no folder nowhere to write x.png into"),
        (["--seeds", 0], "Invalid value for '--seeds'"),
    ],
)
def test_wrong_arguments_exit_with_2_and_say_what_is_possible(arguments, complaint):
    result = run("none.pt", *arguments)
    assert result.exit_code == 2
    assert complaint in words(result.stderr)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["none.pt"], "error: none.pt cannot be read: No such file or directory"),
        (["synthetic:noise"], "error: no spectrum is named 'synthetic:noise'"),
        (["synthetic:mixture", "--world-size", 8192], "or --one-chunk"),
    ],
)
def test_what_cannot_be_simulated_exits_with_1(arguments, complaint):
    result = run(*arguments, "--compressor", "bf16")
    assert result.exit_code == 1
    assert complaint in words(result.stderr)
    assert not result.stdout


def test_a_tensor_is_chosen_by_name(tmp_path):
    torch.save({"a": torch.randn(2, 300), "b": torch.randn(3, 20, 20)}, tmp_path / "g.pt")
    arguments = (tmp_path / "g.pt", "--tensor", "b", "--compressor", "bf16", "--seeds", 1)
    rows = document(*arguments)["rows"]
    assert {(row["world_size"], row["entries"]) for row in rows} == {(3, 400)}


def test_two_levels():
    arguments = (*SMALL, "--topology", "hierarchical", "--compressor", "bf16", "--json")
    result = run(*arguments, "--ranks-per-node", 2)
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)["rows"]
    assert row["topology"] == "hierarchical"
    assert row["bits_per_entry"] == 16
    assert row["hops"] == []
    assert "needs --ranks-per-node" in " ".join(run(*arguments).output.split())
