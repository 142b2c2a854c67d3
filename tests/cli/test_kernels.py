"""``dynamiq kernels``: its words, its numbers and its exit codes."""

import json
import re
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiq.cli import kernels as command
from dynamiq.cli.main import app
from dynamiq.core.errors import KernelError
from dynamiq.kernels.architecture import Target
from dynamiq.kernels.cubin import read_resources
from dynamiq.kernels.nvrtc import compile_kernel
from dynamiq.kernels.registry import (
    ARCHITECTURES,
    ENTRY_FORMATS,
    KERNELS,
    find_architecture,
    find_kernel,
)
from dynamiq.kernels.sass import disassemble

ROOT = Path(__file__).parents[2]
STORE = ["kernels", "--kernel", "store", "--architecture", "sm_90a"]


def run(*arguments):
    return CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, arguments)


def words(text):
    """Return text without frames and line breaks."""
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", text).split())


@pytest.fixture
def planned(monkeypatch):
    """What would be compiled, without compiling it."""
    builds = []

    def pretend(build):
        known = (build.spec.name, build.entry_format, build.width, str(build.architecture))
        builds.append(known)
        return command.Report(*known, 255, 8, 8, 16, 8192, 16000, {}, 1000.0, 16, None)

    monkeypatch.setattr(command, "measure", pretend)
    return builds


def test_the_command_is_installed_under_its_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    value = project["scripts"]["dynamiq"]
    assert EntryPoint("dynamiq", value, "console_scripts").load() is app


def test_the_overview_names_the_command():
    result = run("--help")
    assert result.exit_code == 0
    assert "kernels Show registers, memory and instructions" in words(result.stdout)


def test_help_says_what_is_done_by_default_and_what_can_be_asked():
    result = run("kernels", "--help")
    text = words(result.stdout)

    assert result.exit_code == 0
    assert "Needs no GPU." in text
    assert 'The build for "any" width is the one that runs' in text
    assert "every instruction of the code counts once, both sides of a branch do" in text
    assert f"--kernel NAME One of {', '.join(KERNELS)}; may be repeated." in text
    assert f"--format FORMAT How entries are stored: {', '.join(ENTRY_FORMATS)};" in text
    assert f"--architecture NAME One of {', '.join(map(str, ARCHITECTURES))};" in text
    for default in (", ".join(KERNELS), "FP32", "2, 4, 8", "sm_90a, sm_120a"):
        assert f"[default: {default}]" in text
    assert "--json" in text


def test_by_default_every_kernel_is_built_for_any_width_and_for_three(planned):
    assert run("kernels").exit_code == 0
    assert sorted(planned, key=str) == sorted(
        (
            (name, "FP32" if spec.entry_formats else None, width, architecture)
            for name, spec in KERNELS.items()
            for width in ((None, 2, 4, 8) if spec.has_widths else (None,))
            for architecture in ("sm_90a", "sm_120a")
        ),
        key=str,
    )


def test_options_select(planned):
    result = run(
        *("kernels", "--kernel", "compress", "--kernel", "store", "--format", "bf16"),
        *("--width", "3", "--architecture", "sm_80"),
    )
    assert result.exit_code == 0
    assert planned == [
        ("compress", "BF16", None, "sm_80"),
        ("compress", "BF16", 3, "sm_80"),
        ("store", "BF16", None, "sm_80"),
    ]


def test_kernels_without_a_format_are_left_out(planned):
    arguments = ("--kernel", "mx_compress", "--kernel", "store", "--architecture", "sm_80")
    assert run("kernels", *arguments, "--format", "bf16").exit_code == 0
    assert planned == [("store", "BF16", None, "sm_80")]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kernel", "stor"], "--kernel: no kernel is named 'stor'; there are statistics, comp"),
        (["--format", "fp8"], "--format: no format is named 'fp8'; there are FP32, BF16, FP16"),
        (["--kernel", "mx_compress", "--format", "bf16"], "--format: mx_compress: not written for"),
        (["--width", "11"], "--width: no code has 11 bits; there are 1, 2,"),
        (["--width", "two"], "Invalid value for '--width': Input should be a valid integer"),
        (["--architecture", "sm_77"], "not built for sm_77; they are for sm_80, sm_86,"),
        (["--architecture", "hopper"], "--architecture: 'hopper' is no architecture"),
        (["--verbose"], "No such option: --verbose"),
    ],
)
def test_wrong_arguments_exit_with_2_and_list_what_there_is(planned, arguments, complaint):
    result = run("kernels", *arguments)

    assert result.exit_code == 2
    assert complaint in words(result.stderr)
    assert not result.stdout
    assert not planned


def test_what_cannot_be_compiled_exits_with_1(monkeypatch):
    def refuse(build):
        raise KernelError("compiling for a GPU needs NVRTC")

    monkeypatch.setattr(command, "measure", refuse)
    result = run(*STORE)

    assert result.exit_code == 1
    assert result.stderr.strip().endswith("error: compiling for a GPU needs NVRTC")
    assert not result.stdout


def test_json_holds_what_compiler_and_disassembler_say():
    result = run(*STORE, "--json")

    compiled = compile_kernel(find_kernel("store"), "FP32", Target(find_architecture("sm_90a")))
    resources = read_resources(compiled.code, "store")
    listing = disassemble(compiled.code, "store")
    assert result.exit_code == 0
    (report,) = json.loads(result.stdout)
    assert report == {
        "kernel": "store",
        "format": "FP32",
        "width": None,
        "architecture": "sm_90a",
        "registers": resources.registers,
        "spill_stores_bytes": 0,
        "spill_loads_bytes": 0,
        "local_bytes": 0,
        "shared_bytes": resources.shared_bytes,
        "instructions": len(listing.instructions),
        "instructions_by_class": listing.count_by_class(),
        "instructions_per_entry": len(listing.instructions) / 16,
        "widest_load_bytes": 16,
        "verified_on": None,
    }


def test_the_table_holds_the_same_numbers():
    (report,) = json.loads(run(*STORE, "--json").stdout)
    lines = run(*STORE).stdout.splitlines()

    assert lines[0].strip() == "store"
    (row,) = [line.split() for line in lines if "sm_90a" in line]
    assert row == [
        *("FP32", "–", "sm_90a", str(report["registers"]), "0", "0", str(report["shared_bytes"])),
        *(f"{report['instructions_per_entry']:.1f}", "16", "–"),
    ]


def test_the_table_tells_builds_for_one_width_from_the_one_that_runs(planned):
    result = run("kernels", "--kernel", "compress", "--width", "4")
    rows = [line.split() for line in result.stdout.splitlines() if "sm_90a" in line]

    assert [row[1] for row in rows] == ["any", "4"]


def test_the_table_names_the_gpu_that_a_kernel_was_verified_on(monkeypatch, planned):
    pretend = command.measure
    monkeypatch.setattr(
        command, "measure", lambda build: replace(pretend(build), verified_on="NVIDIA H200")
    )
    assert {"NVIDIA", "H200"} <= set(run(*STORE).stdout.split())


def test_the_table_fits_into_80_columns(planned):
    lines = run("kernels").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not [line for line in lines if "…" in line]


def test_importing_the_command_needs_neither_compiler_nor_gpu(monkeypatch):
    """The help must work where the extra is missing."""
    for name in ("cuda", "cuda.core", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    assert run("kernels", "--help").exit_code == 0
