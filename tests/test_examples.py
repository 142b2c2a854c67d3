"""Every example runs as its first lines say, and prints what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
PROMISES = {
    "all_reduce_in_one_process": "vNMSE",
    "custom_compressor": "butterfly: 8.46 bits",
    "ddp_hook": "uncompressed calls: {'warm-up': 2}",
    "training_loop": "step 20: loss",
}


def test_every_example_is_known() -> None:
    assert [path.stem for path in EXAMPLES] == sorted(PROMISES)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    command = path.read_text().split('"""')[1].strip().splitlines()[-1].split()
    assert command[-1] == f"examples/{path.name}"
    program = {
        "python": [sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run"],
    }
    arguments = [*program[command[0]], *command[1:-1], str(path)]
    if command[0] == "torchrun":
        arguments.insert(3, "--standalone")
    result = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert result.returncode == 0, result.stderr
    assert PROMISES[path.stem] in result.stdout


def test_custom_compressor_is_short() -> None:
    source = (Path(__file__).parent.parent / "examples" / "custom_compressor.py").read_text()
    body = source[source.index("@compressor_registry.register") : source.index("def main")]
    assert len([line for line in body.splitlines() if line.strip()]) <= 45
