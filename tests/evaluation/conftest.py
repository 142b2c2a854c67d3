"""What the tests of ``evaluation`` share: skips with their reasons, and a plan to run."""

import os
import signal
from collections.abc import Iterator

import pytest

from dynamiq import Butterfly, Uncompressed
from evaluation.network import available
from evaluation.records import Plan
from evaluation.reviews import missing_packages


@pytest.fixture(scope="session")
def needs_namespaces() -> None:
    """Skip where network namespaces cannot be made."""
    possible = available()
    if not possible:
        pytest.skip(possible.reason)


@pytest.fixture(scope="session")
def needs_demo_packages() -> None:
    """Skip where the packages of the extra ``demo`` are not installed."""
    pytest.importorskip("matplotlib", reason="not installed: matplotlib (the extra `demo`)")
    if reason := missing_packages():
        pytest.skip(reason)


@pytest.fixture
def heeded_hangup() -> Iterator[None]:
    """Heed SIGHUP, which nohup ignores here and in all children, as anyone does by default."""
    before = signal.getsignal(signal.SIGHUP)
    if before is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def plan() -> Plan:
    """A short run."""
    return Plan(label="BF16", compressor=Uncompressed("bf16"), topology=Butterfly(), steps=2)


@pytest.fixture
def pythonpath(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    """Let processes started by a test import what the test imports."""
    paths = [str(pytestconfig.rootpath), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
