"""The time to decide is measured beside the time to compress."""

import pytest
import typer
from typer.testing import CliRunner

from evaluation import allocation


@pytest.mark.parametrize("recipe", allocation.RECIPES)
def test_every_recipe_is_timed(recipe: str) -> None:
    compress_s, decide_s, learn_s = allocation.measure(recipe, 100_000, 4, 1)
    assert compress_s > 0
    assert decide_s > 0
    assert learn_s > 0


def test_the_median_leaves_the_first_run_out() -> None:
    runs: list[int] = []
    assert allocation.median_s(lambda: runs.append(1), 3) >= 0
    assert len(runs) == 4


def test_table() -> None:
    app = typer.Typer()
    app.command()(allocation.main)
    result = CliRunner().invoke(app, ["--entries", "50000", "--times", "1"])
    assert result.exit_code == 0, result.output
    assert all(recipe in result.output for recipe in allocation.RECIPES)
