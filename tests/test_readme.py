"""README says only what is so: its code runs, its links lead somewhere, its commands exist."""

import os
import re
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_first_example_is_short_and_its_names_are_public() -> None:
    import dynamiq

    lines = [line for line in CODE[0].splitlines() if line.strip()]
    assert len(lines) <= 12
    names = re.search(r"from dynamiq import (.*)", CODE[0])
    assert names is not None
    assert set(names.group(1).split(", ")) <= set(dynamiq.__all__)


def test_first_example_trains(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    def train(model: nn.Module) -> None:
        for _ in range(4):
            model(torch.randn(8, 128)).square().mean().backward()

    one_rank = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    printed: list[object] = []
    names = {"make_model": lambda: nn.Linear(128, 512), "train": train, "print": printed.append}
    with mock.patch.dict(os.environ, one_rank):
        try:
            exec(CODE[0], names)
        finally:
            names["pipeline"].close()  # type: ignore[attr-defined]
            dist.destroy_process_group()
    assert printed[0].calls == 4
    assert printed[0].skips == {"warm-up": 2}


def test_other_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    for code in CODE[1:]:
        exec(code, {})
    assert " bits" in capsys.readouterr().out


def test_commands_exist() -> None:
    for command in re.findall(r"^(scripts/\w+)", README, re.MULTILINE):
        assert os.access(ROOT / command, os.X_OK), command
