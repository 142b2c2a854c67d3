"""The entry points for people and CI, as far as they can be checked without a new environment."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    *(f"scripts/{name}" for name in ("bench", "demo", "gpu-check", "lint", "test")),
    ".ci/run",
]


def normalised(requirement: str) -> str:
    """Return a requirement's package name as package indexes compare it."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normalised(name): version for name, version in pairs}


def test_every_requirement_is_pinned(pins):
    configuration = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = configuration["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    required = {normalised(line) for group in groups for line in group}
    assert required <= pins.keys()
    assert configuration["build-system"]["requires"] == [f"hatchling=={pins['hatchling']}"]


def test_pins_hold_for_every_build_of_a_package(pins):
    local = {name: version for name, version in pins.items() if "+" in version}
    assert not local, "a local version such as 2.13.0+cpu exists on one index only"


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_executable_and_parses(script):
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_help_names_the_tiers_and_installs_nothing():
    text = subprocess.check_output([ROOT / "scripts/test", "--help"], text=True, timeout=10)
    for word in ("--soak", "--sanitize", "benchmarks", "pytest"):
        assert word in text
