"""The host build: what it does when its compiler or its cache fails, and what it keeps apart."""

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from dynamiq.core.errors import KernelError
from dynamiq.core.layout import Layout
from dynamiq.kernels import host
from dynamiq.kernels.registry import SOURCE, kernels_of
from dynamiq.kernels.supergroups import ops, reference
from dynamiq.kernels.supergroups.wire import Address
from tests.kernels.supergroups import operations
from tests.kernels.supergroups.operations import Call
from tests.processes import run_ranks

COMPILER = host.find_compiler()[0]
MAKES_GARBAGE = """[[ $* == *-shared* ]] && echo garbage >"${@: -2:1}" || exec c++ "$@" """


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache; kernels are compiled quickly and run slowly."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DYNAMIQ_CACHE", str(folder))
    monkeypatch.setenv("DYNAMIQ_HOST_FLAGS", "-O0")
    monkeypatch.setenv("CXX", COMPILER)
    host.library.cache_clear()
    yield folder
    host.library.cache_clear()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache that is complete, to be copied."""
    folder = tmp_path_factory.mktemp("made")
    with mock.patch.dict(
        os.environ, DYNAMIQ_CACHE=str(folder), DYNAMIQ_HOST_FLAGS="-O0", CXX=COMPILER
    ):
        host.Library("supergroups", "FP32")
    return folder


@pytest.fixture
def script(tmp_path):
    """Return what makes a compiler of some lines of bash."""

    def write(body):
        path = tmp_path / "compiler"
        path.write_text(f"#!/bin/bash\n{body.replace('c++', COMPILER)}\n")
        path.chmod(0o755)
        return str(path)

    return write


def result(dtype=torch.float32, build=ops):
    """Return energies and a payload of some entries."""
    x = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    address = Address(seed=1, call=2, hop=3, sender=0, world_size=2)
    c = Call.of(x, Layout(3000, 2, 256), operations.quantizer((2, 4, 8)), address)
    payload = c.payload()
    build.compress(c.values, c.tiles, c.quantizer, payload)
    return [*build.statistics(c.values.bucket, 2), payload]


def assert_right(dtype=torch.float32):
    for ours, expected in zip(result(dtype), result(dtype, reference), strict=True):
        assert torch.equal(ours, expected)


def libraries(cache):
    return sorted(cache.rglob("*.so"))


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: os.truncate(path, path.stat().st_size // 2),
        lambda path: os.truncate(path, 0),
        lambda path: path.write_bytes(b"garbage" * 1000),
        flip_a_bit,
        Path.unlink,
    ],
    ids=["truncated", "empty", "garbage", "one bit", "missing"],
)
def test_a_damaged_library_is_made_again_and_no_other(cache, made, damage):
    shutil.copytree(made, cache)
    damaged, *whole = libraries(cache)
    kept = {path: path.stat().st_ino for path in whole}
    good = damaged.read_bytes()
    damage(damaged)

    assert host.library("supergroups", "FP32")

    assert damaged.stat().st_size == len(good)
    assert {path: path.stat().st_ino for path in whole} == kept
    assert_right()


def test_what_is_whole_is_not_made_again(cache, made, monkeypatch, script):
    shutil.copytree(made, cache)
    monkeypatch.setenv("CXX", script("[[ $* == *-shared* ]] && exit 1; exec c++ $*"))
    assert host.library("supergroups", "FP32")
    assert_right()


@pytest.mark.parametrize("place", ["a file", "below a file", "read-only"])
def test_without_a_cache_kernels_are_made_for_this_process(place, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    folders = {"a file": "file", "below a file": "file/cache", "read-only": "/proc/dynamiq"}
    monkeypatch.setenv("DYNAMIQ_CACHE", str(tmp_path / folders[place]))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    assert host.library("supergroups", "FP32")

    assert_right()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "for this process alone" in record.message
    assert "set DYNAMIQ_CACHE to another folder" in record.message
    assert not list((tmp_path / "temporary").iterdir())


def test_without_any_place_the_reason_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("DYNAMIQ_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    with pytest.raises(KernelError, match=r"there is no place for compiled kernels: .*file"):
        host.Library("supergroups", "FP32")


BROKEN = {
    "missing": (None, r"/no/such/c\+\+ cannot be run; set CXX to another"),
    "failing": (
        "echo 'out of order' >&2; exit 3",
        "status 3; set CXX to another(.|\n)*out of order",
    ),
    "idle": ("exit 0", "made nothing; set CXX to another"),
    "confused": (MAKES_GARBAGE, "cannot be loaded; set CXX to another"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_without_a_working_compiler_the_reference_runs_with_one_warning(kind, script, monkeypatch):
    body, reason = BROKEN[kind]
    monkeypatch.setenv("CXX", script(body) if body else "/no/such/c++")
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        for dtype in (torch.float32, torch.float32, torch.bfloat16):
            assert_right(dtype)
    said = [str(warning.message) for warning in caught]
    assert len(said) == 2
    for text, entry_format in zip(said, ("FP32", "BF16"), strict=True):
        assert text.startswith(
            f"dynamiq does what its supergroups kernels do for {entry_format} in torch"
        )
        assert "times slower" in text


def test_no_compiler_on_the_path(tmp_path, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"none of c\+\+, g\+\+, clang\+\+ .*apt-get install"):
        assert_right()


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_compiler_on_the_path_is_taken(first, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in host.COMPILERS[first:]:
        (tmp_path / name).touch(0o755)
    assert host.find_compiler() == (str(tmp_path / host.COMPILERS[first]),)


def test_a_compiler_may_have_arguments(monkeypatch):
    monkeypatch.setenv("CXX", "ccache 'my c++'")
    assert host.find_compiler() == ("ccache", "my c++")


def made_with(rank, environment):
    with mock.patch.dict(os.environ, environment):
        host.library.cache_clear()
        results = result()
        host.library.cache_clear()
    return [tensor.tolist() for tensor in results]


def test_of_processes_that_start_at_once_one_compiles(cache, script, tmp_path):
    log = tmp_path / "log"
    compiler = script(f'[[ $* == *-shared* ]] && echo "${{@: -1}}" >>{log}; exec c++ "$@"')
    environment = {"DYNAMIQ_CACHE": str(cache), "DYNAMIQ_HOST_FLAGS": "-O0", "CXX": compiler}

    results = run_ranks(made_with, 4, environment, group=False)

    compiled = sorted(Path(line).stem for line in log.read_text().splitlines())
    assert compiled == sorted(spec.name for spec in kernels_of("supergroups"))
    assert results == [[tensor.tolist() for tensor in result(build=reference)]] * 4


@pytest.mark.parametrize("header", ["supergroups/wire.cuh", "team.cuh"])
def test_sources_flags_compiler_and_cpu_have_folders_of_their_own(
    cache, script, tmp_path, monkeypatch, header
):
    def moved(family, entry_format):
        return [replace(spec, root=tmp_path / "source") for spec in kernels_of(family)]

    monkeypatch.setenv("CXX", script(MAKES_GARBAGE))
    changes = [
        lambda: None,
        lambda: monkeypatch.setenv("DYNAMIQ_HOST_FLAGS", "-O1"),
        lambda: monkeypatch.setenv("DYNAMIQ_HOST_FLAGS", "-O1 -march=x86-64-v2"),
        lambda: monkeypatch.setenv("CXX", f"{tmp_path}/compiler -D__VERSION__='another'"),
        lambda: monkeypatch.setattr(host, "built_together", moved),
    ]
    shutil.copytree(SOURCE, tmp_path / "source")
    with (tmp_path / "source" / header).open("a") as file:
        file.write("// another comment\n")
    for count, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            with pytest.raises(KernelError, match="cannot be loaded"):
                host.Library("supergroups", "FP32")
            assert len(list(cache.iterdir())) == count


def test_a_process_that_is_killed_while_it_compiles_leaves_no_damage(cache, script, tmp_path):
    compiler = script(
        f'[[ $* == *-shared* ]] && {{ echo half >"${{@: -2:1}}"; touch {tmp_path}/on; sleep 60; }}'
        '\nexec c++ "$@"'
    )
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from dynamiq.kernels import host; host.library('supergroups', 'FP32')",
        ],
        env={**os.environ, "CXX": compiler},
        start_new_session=True,
    )
    while not (tmp_path / "on").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    (folder,) = cache.glob("*/fp32")
    assert list(folder.glob("making-*/*.so")), "it was in the middle of it"

    assert host.library("supergroups", "FP32")

    assert_right()
    expected = {"lock", *(f"{spec.name}.so" for spec in kernels_of("supergroups"))}
    assert {path.name for path in folder.iterdir()} == expected


@pytest.mark.parametrize("flags", ["-O1 -march=x86-64-v2", "-O2"])
def test_flags_of_the_user_change_no_bit(flags, monkeypatch):
    monkeypatch.setenv("DYNAMIQ_HOST_FLAGS", flags)
    with warnings.catch_warnings(action="error"):
        assert_right()
        assert_right(torch.float16)
