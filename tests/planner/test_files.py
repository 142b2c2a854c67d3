"""Profiles in files: they come back as they were, and whatever is none is refused in one line."""

import json

import pytest

from dynamiq.core.errors import InputError
from dynamiq.planner import files
from dynamiq.planner.profiles import presets
from dynamiq.planner.profiles.hardware import HardwareProfile
from dynamiq.planner.profiles.workload import WorkloadProfile
from tests.planner.clusters import cluster, training

HARDWARE = cluster(4, cores=0.5)
WORK = training((1000, 0.1), (2000, 0.3))


@pytest.mark.parametrize("value", [HARDWARE, WORK], ids=["hardware", "workload"])
def test_profiles_come_back_as_they_were(value, tmp_path):
    path = tmp_path / "profile.json"
    files.write(path, value)
    assert files.read(path, type(value)) == value
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"]


def broken(**changes):
    document = {**HARDWARE.to_dict(), **changes}
    return json.dumps({name: value for name, value in document.items() if value != "left out"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no JSON: "),
        ("{", "holds no JSON: "),
        ("[1]", "holds a JSON list, no hardware profile"),
        (
            broken(version=2),
            "has the version 2, and this dynamiq reads hardware profiles of version 1",
        ),
        (broken(version=True), "has the version True"),
        (broken(version="left out"), "has the version None"),
        (
            broken(world_size=0),
            "is no hardware profile: HardwareProfile cannot be built with world_",
        ),
        (broken(world_size="left out"), "world_size"),
        (broken(speed=3), "speed=3: Extra inputs are not permitted (and 1 more)"),
        (broken(name=float("nan")), "NaN is not a number"),
        (broken(channels=-1), "channels=-1: Input should be greater than or equal to 1"),
    ],
)
def test_other_files_are_refused_in_one_line(text, words, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InputError) as refused:
        files.read(path, HardwareProfile)
    message = str(refused.value)
    assert words in message
    assert str(path) in message
    assert "\n" not in message


def test_missing_and_unreadable_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file or directory"):
        files.read(tmp_path / "none.json", WorkloadProfile)
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        files.read(tmp_path, WorkloadProfile)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is no text, so no workload profile"):
        files.read(tmp_path / "bytes", WorkloadProfile)


def test_what_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(InputError, match="cannot be written: No such file or directory"):
        files.write(tmp_path / "none" / "profile.json", WORK)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        files.write(tmp_path / "folder", WORK)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_presets_say_where_they_come_from_and_whether_they_were_measured():
    for known in (*presets.NETWORKS.values(), *presets.NODES.values()):
        assert len(known.source) > 20
        assert known.measured == ("bandwidth measured" in known.source)
    rates = {name: known.link.bandwidth_bytes_per_s * 8 for name, known in presets.NETWORKS.items()}
    for name, rate in rates.items():
        line = float(name.partition("-")[2].removesuffix("g")) * 1e9
        assert 0.94 * line < rate <= line
    assert set(rates) >= {f"ethernet-{g}g" for g in (1, 10, 25, 100, 400)}
