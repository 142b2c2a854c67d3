"""Signals become exceptions, wait for clean-ups, and follow a parent's death."""

import signal
import subprocess
import sys

import pytest

from evaluation.interruption import Interrupted, interruptions_raise, uninterrupted


@pytest.mark.usefixtures("heeded_hangup")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_and_the_old_handler_returns(signum: signal.Signals) -> None:
    before = signal.getsignal(signum)
    with pytest.raises(Interrupted, match=signum.name) as raised, interruptions_raise():
        signal.raise_signal(signum)
    assert raised.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before


def test_a_signal_waits_for_the_end_of_a_clean_up() -> None:
    done = False
    with pytest.raises(Interrupted), interruptions_raise(), uninterrupted():
        signal.raise_signal(signal.SIGTERM)
        done = True
    assert done


@pytest.mark.skipif(sys.platform != "linux", reason="a Linux feature")
@pytest.mark.usefixtures("pythonpath")
def test_a_process_ends_with_its_parent() -> None:
    child = (
        "import os, time; from evaluation.interruption import end_with; "
        "end_with(os.getppid()); print('ready', flush=True); time.sleep(300)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.kill()
        # The child holds the other end of the pipe: this returns when the child is gone.
        assert process.stdout.read() == ""


@pytest.mark.usefixtures("pythonpath")
def test_a_process_whose_parent_is_dead_does_not_begin() -> None:
    code = "from evaluation.interruption import end_with; end_with(1 << 30); print('began')"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "launcher ended" in done.stderr
