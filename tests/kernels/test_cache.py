"""Where compiled kernels are kept."""

from pathlib import Path

import pytest

from dynamiq.kernels.cache import cache_folder, source_digest


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("DYNAMIQ_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/home/ada/.cache/dynamiq"),
        ({"XDG_CACHE_HOME": "/scratch"}, "/scratch/dynamiq"),
        ({"XDG_CACHE_HOME": ""}, "/home/ada/.cache/dynamiq"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/ada/.cache/dynamiq"),
        ({"DYNAMIQ_CACHE": "/kernels", "XDG_CACHE_HOME": "/scratch"}, "/kernels"),
        ({"DYNAMIQ_CACHE": ""}, "/home/ada/.cache/dynamiq"),
    ],
)
def test_the_folder(environment, variables, folder):
    for name, value in variables.items():
        environment.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_asking_creates_nothing(environment, tmp_path):
    environment.setenv("DYNAMIQ_CACHE", str(tmp_path / "absent"))
    assert not cache_folder().exists()


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "a.cu").write_text("one")
    (tmp_path / "b.cuh").write_text("two")
    return tmp_path


def test_the_digest_is_of_names_and_bytes(sources):
    digests = [source_digest(sources)]
    (sources / "b.cuh").write_text("2")
    digests.append(source_digest(sources))
    (sources / "b.cuh").rename(sources / "c.cuh")
    digests.append(source_digest(sources))
    (sources / "d.cu").write_text("")
    digests.append(source_digest(sources))
    assert len(set(digests)) == 4


def test_the_digest_is_of_all_folders(sources, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    before = source_digest(sources, other)
    (other / "a.cuh").write_text("one")
    assert source_digest(sources, other) != before


def test_the_digest_is_of_sources_only(sources):
    before = source_digest(sources)
    (sources / "notes.md").write_text("for people")
    assert source_digest(sources) == before
