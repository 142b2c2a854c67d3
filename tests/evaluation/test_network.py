"""Hosts exist, are as slow as they should be, and leave nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation import namespaces, network
from evaluation.namespaces import NetworkError, remove_leftovers
from evaluation.network import Hosts, available

needs_namespaces = [
    pytest.mark.network,
    pytest.mark.usefixtures("needs_namespaces", "pythonpath"),
]

# Prints the pid of a process on a host once everything is up, then waits to be ended.
HOLD = """
import subprocess
from evaluation.network import Hosts
with Hosts(2, rate_mbit=100) as hosts:
    guest = subprocess.Popen(hosts.command(1, ["sleep", "300"]), start_new_session=True)
    print(guest.pid, flush=True)
    guest.wait()
"""


def names_of(pid: int) -> set[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True)
    return set(re.findall(rf"^dynamiq-{pid}-\d+-\d+-\w+", listed.stdout, re.MULTILINE))


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> None:
    give_up = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < give_up, f"process {pid} is still there"
        time.sleep(0.01)


class TestHosts:
    pytestmark = needs_namespaces

    @pytest.mark.parametrize("rate_mbit", [25, 200])
    def test_a_link_carries_its_rate_and_not_more(self, rate_mbit: float) -> None:
        with Hosts(2, rate_mbit=rate_mbit) as hosts:
            for sender, receiver in (0, 1), (1, 0):
                # On a busy machine a probe may be kept from its processor: one clean try counts.
                tries = (hosts.measure_mbit(sender, receiver) / rate_mbit for _ in range(3))
                assert any(0.9 <= share <= 1.0 for share in tries)

    def test_two_networks_stand_side_by_side(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True
        ) as other:
            try:
                assert other.stdout is not None
                other.stdout.readline()
                with Hosts(2, rate_mbit=50) as hosts:
                    assert hosts.measure_mbit(seconds=0.3) > 0
                    assert remove_leftovers() == []
                assert len(names_of(other.pid)) == 3
            finally:
                other.send_signal(signal.SIGTERM)
        assert names_of(other.pid) == set()

    def test_the_machine_s_own_network_is_left_alone(self) -> None:
        before = interfaces()
        with Hosts(2, rate_mbit=50):
            assert interfaces() == before
        assert interfaces() == before

    def test_an_exception_removes_them(self) -> None:
        with pytest.raises(RuntimeError, match="mine"), Hosts(3, rate_mbit=50):
            assert len(names_of(os.getpid())) == 4
            raise RuntimeError("mine")
        assert names_of(os.getpid()) == set()

    def test_a_failure_halfway_removes_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network, "_shaping", lambda *_: ["qdisc", "add", "nonsense"])
        with pytest.raises(NetworkError, match="nonsense"), Hosts(2, rate_mbit=50):
            pass
        assert names_of(os.getpid()) == set()

    @pytest.mark.usefixtures("heeded_hangup")
    @pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_a_signal_removes_them_and_what_runs_there(self, signum: signal.Signals) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", HOLD],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as holder:
            assert holder.stdout is not None
            guest = int(holder.stdout.readline())
            assert len(names_of(holder.pid)) == 3
            holder.send_signal(signum)
        assert names_of(holder.pid) == set()
        wait_until_gone(guest)

    def test_a_later_start_removes_what_a_killed_one_left(self) -> None:
        with subprocess.Popen(
            [sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True
        ) as holder:
            assert holder.stdout is not None
            guest = int(holder.stdout.readline())
            holder.kill()
        left = names_of(holder.pid)
        assert len(left) == 3
        assert left <= set(remove_leftovers())
        assert names_of(holder.pid) == set()
        wait_until_gone(guest)


@pytest.mark.parametrize("rate_mbit", [0, -1, 0.05, float("nan"), float("inf")])
def test_an_impossible_rate_is_refused(rate_mbit: float) -> None:
    with pytest.raises(ValueError, match=r"at least 0\.1 Mbit/s"):
        Hosts(2, rate_mbit=rate_mbit)


@pytest.mark.parametrize("world_size", [0, 254])
def test_an_impossible_number_of_hosts_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match="1 to 253"):
        Hosts(world_size, rate_mbit=10)


class TestAvailable:
    def test_names_a_missing_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network.sys, "platform", "linux")
        monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
        assert not available()
        assert "`tc`" in available().reason
        assert "install" in available().reason

    def test_names_missing_rights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(network.sys, "platform", "linux")
        monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
        monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
        assert not available()
        assert "sudo" in available().reason

    def test_hands_on_the_system_s_refusal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise NetworkError("`ip netns add` failed: Operation not permitted")

        monkeypatch.setattr(network.sys, "platform", "linux")
        monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
        monkeypatch.setattr(network.os, "geteuid", lambda: 0)
        monkeypatch.setattr(namespaces, "run", refuse)
        assert "Operation not permitted" in available().reason
        assert "--cap-add" in available().reason
