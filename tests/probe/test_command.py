"""``dynamiq probe``: on real ranks, refused, and with a rank that dies."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dynamiq import DynamiQCompressor, LoopbackTransport, Uncompressed
from dynamiq.cli.main import app
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.planner.profiles.hardware import HardwareProfile
from dynamiq.probe import codecs, hardware, links
from tests.processes import run_ranks

TORCHRUN = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def invoke(*arguments, **environment):
    return CliRunner().invoke(app, ["probe", *arguments], env=environment)


def probe_on(rank, environment, folder, dies):
    """Run the command with two formats and small messages; returns exit code and output."""

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codecs, "MESSAGE_ENTRIES", (1024, 4096))
        patch.setattr(hardware, "MESSAGE_ENTRIES", (1024, 4096))
        patch.setattr(links, "SIZES", (1024, 4096, 65536))
        patch.setattr(hardware, "SIZES", (1024, 4096, 65536))
        formats = (Uncompressed("bf16"), DynamiQCompressor(bit_budget=5.0))
        patch.setattr(hardware, "candidates", lambda: formats)
        if dies and rank == 1:
            patch.setattr(hardware, "measure_codec", die)
        ended = invoke("--output", f"{folder}/p.json", **environment, RANK=str(rank))
    assert ended.exception is None or isinstance(ended.exception, SystemExit)
    return ended.exit_code, ended.output


@pytest.fixture
def environment():
    """What torchrun sets, with a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return {**TORCHRUN, "MASTER_PORT": str(server.getsockname()[1])}


def test_ranks_measure_each_other_and_the_first_writes(environment, tmp_path):
    (first, said), (second, silent) = run_ranks(
        probe_on, 2, environment, str(tmp_path), False, group=False
    )

    assert (first, second) == (0, 0), said + silent
    profile = HardwareProfile.model_validate_json((tmp_path / "p.json").read_text())
    assert (profile.world_size, profile.ranks_per_node, profile.channels) == (2, 2, 4)
    assert profile.source == "dynamiq probe"
    assert [t.message_bytes for t in profile.node.measured] == [1024, 4096, 65536]
    assert profile.network.bandwidth_bytes_per_s == pytest.approx(
        2 * profile.node.bandwidth_bytes_per_s
    )
    processor = profile.processor
    assert processor.device == "cpu"
    assert processor.cores_per_rank == len(os.sched_getaffinity(0)) / 2
    assert min(processor.memory_bytes_per_s, processor.message_s, processor.byte_s) > 0
    kinds = {c.compressor.kind: c for c in processor.codecs}
    assert set(kinds) == {"uncompressed", "dynamiq"}
    assert kinds["dynamiq"].compressor.bit_budget == 5
    assert kinds["dynamiq"].compress != kinds["dynamiq"].recompress
    assert kinds["uncompressed"].statistics_message.fixed_s == 0
    assert HardwareProfile(**json.loads(json.dumps(profile.to_dict()))) == profile
    assert "dynamiq, 5 bits" in said
    assert "p.json" in said
    assert not silent


def test_a_rank_that_dies_ends_the_others_with_a_line(environment, tmp_path):
    (code, said), _ = run_ranks(
        probe_on, 2, environment, str(tmp_path), True, group=False, lost={1}
    )
    assert code == 1
    errors = [line for line in said.splitlines() if line.strip()]
    assert errors[-1].startswith("error: ")
    assert "rank 1" in errors[-1]
    assert not (tmp_path / "p.json").exists()


@pytest.mark.parametrize(
    ("arguments", "changes", "message"),
    [
        ((), {"MASTER_PORT": None}, "MASTER_PORT is not set; start it with torchrun"),
        ((), {"WORLD_SIZE": "1"}, "this group has one: torchrun --nproc-per-node"),
        (("--timeout", "0"), {}, "a timeout is more than 0"),
        (("--timeout", "nan"), {}, "not nan"),
        (("--output", "/nowhere/p.json"), {}, "there is no folder /nowhere"),
        (("--device", "tpu"), {}, "a device is cpu or cuda, not tpu"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(arguments, changes, message):
    ended = invoke(*arguments, **{**TORCHRUN, "RANK": "0", **changes})
    assert ended.exit_code == 2
    assert message in ended.output
    assert ended.output.count("\n") == 1


def test_one_rank_speaks_for_all():
    ended = invoke(**{**TORCHRUN, "RANK": "1", "WORLD_SIZE": "1"})
    assert (ended.exit_code, ended.output) == (2, "")


@pytest.mark.soak
def test_under_torchrun(tmp_path):
    script = "import sys; from dynamiq.cli.main import app; sys.argv[0] = 'dynamiq'; app()"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--no-python", sys.executable, "-c", script, "probe", "--link-seconds", "2"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=110)
    profile = HardwareProfile.model_validate_json((tmp_path / "profile.json").read_text())
    assert len(profile.processor.codecs) == len(codecs.candidates())


def test_a_probe_refuses_what_it_cannot_do():
    (alone,) = LoopbackTransport.world(1)
    with pytest.raises(InputError, match="this group has one"):
        hardware.probe(alone)
    with pytest.raises(ConfigurationError, match="positive number of seconds, not nan"):
        hardware.probe(alone, link_budget_s=float("nan"))
