"""What is derived from a measurement, and from a datasheet."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiq.core.errors import InputError
from dynamiq.kernels.registry import ARCHITECTURES
from dynamiq.roofline.machine import H200, MACHINES
from dynamiq.roofline.measured import read
from dynamiq.roofline.row import Row

RUN = Path(__file__).parents[1] / "data" / "kernel_benchmarks.json"
ROW = Row(
    kernel="compress",
    format="FP32",
    width=4,
    rounding="stochastic",
    machine="a CPU",
    build="host",
    predicted=False,
    threads=1,
    entries=1000,
    entries_per_s=2e8,
    bytes_per_entry=5.0,
    copy_bytes_per_s=4e9,
    instructions_per_entry=10.0,
)


def test_what_follows_from_a_row():
    assert ROW.bytes_per_s == 1e9
    assert ROW.share_of_copy == 0.25
    assert ROW.instructions_per_byte == 2.0
    assert ROW.binds == "compute"
    assert replace(ROW, copy_bytes_per_s=1.25e9).binds == "memory"
    assert replace(ROW, instructions_per_entry=None).instructions_per_byte is None
    assert json.loads(json.dumps(ROW.as_dict()))["share_of_copy"] == 0.25


def test_a_run_is_read():
    rows = {row.kernel: row for row in read(RUN)}
    assert set(rows) >= {"copy", "statistics", "compress", "decompress"}
    benchmarks = {b["extra_info"]["kernel"]: b for b in json.loads(RUN.read_text())["benchmarks"]}
    for kernel, row in rows.items():
        info, seconds = benchmarks[kernel]["extra_info"], benchmarks[kernel]["stats"]["median"]
        assert row.entries_per_s == pytest.approx(info["entries"] / seconds)
        assert row.bytes_per_s == pytest.approx(
            (info["read_bytes"] + info["written_bytes"]) / seconds
        )
        assert row.copy_bytes_per_s == pytest.approx(8 * info["entries"] / info["copy_s"])
        assert (row.predicted, row.threads, row.entries) == (False, 1, 1 << 24)
    assert rows["compress"].instructions_per_entry > 1


def test_calls_of_a_round_share_its_time(tmp_path):
    run = json.loads(RUN.read_text())
    for benchmark in run["benchmarks"]:
        benchmark["extra_info"]["calls"] = 20
    path = tmp_path / "run.json"
    path.write_text(json.dumps(run))
    for one, many in zip(read(RUN), read(path), strict=True):
        assert many.entries_per_s == pytest.approx(20 * one.entries_per_s)
        assert many.share_of_copy == pytest.approx(one.share_of_copy)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "cannot be read: No such file"),
        ("nonsense", "is no JSON of kernel benchmarks"),
        ("[]", "is no JSON of kernel benchmarks"),
        ('{"benchmarks": [{"extra_info": {"kernel": "store"}}]}', "is no JSON of kernel bench"),
        ('{"benchmarks": [{"extra_info": {}}]}', "holds 1 benchmarks, none of a kernel"),
    ],
)
def test_other_files_are_refused_and_the_error_says_how_to_make_one(tmp_path, text, complaint):
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=complaint) as error:
        read(path)
    assert "scripts/test tests/benchmarks/test_kernels.py --benchmark-json" in str(error.value)


def test_the_tighter_bound_counts():
    assert H200.instructions_per_s == pytest.approx(132 * 4 * 32 * 1.98e9)
    assert H200.entries_per_s(bytes_per_entry=8, instructions_per_entry=1) == 4.8e12 / 8
    few = H200.entries_per_s(bytes_per_entry=1, instructions_per_entry=1000)
    assert few == pytest.approx(H200.instructions_per_s / 1000)


def test_the_clock_follows_from_the_datasheets_flops():
    assert 132 * 128 * 2 * H200.clock_hz == pytest.approx(67e12, rel=0.01)


def test_machines_have_an_architecture_that_kernels_are_built_for():
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.architecture in map(str, ARCHITECTURES)
        assert "datasheet" in machine.source
