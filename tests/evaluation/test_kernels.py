"""The kernels' speed beside a copy: what is timed, and what is claimed of the times."""

import json
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from evaluation import kernels
from evaluation.kernels import (
    COMPRESS,
    COPY,
    DECOMPRESS,
    FUSED,
    LOAD,
    MX_FP4,
    STATISTICS,
    STORE,
    Times,
)


def times(*wall_s: float) -> Times:
    return Times(list(wall_s), [2 * second for second in wall_s])


def test_table_and_json(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(kernels.main)
    output = tmp_path / "kernels.json"
    options = ["--entries", "65536", "--pairs", "2", "--output", str(output)]
    result = CliRunner().invoke(app, options)

    assert result.exit_code == 0, result.output
    report = json.loads(output.read_text())
    assert {(row["operation"], row["threads"]) for row in report["rows"]} >= {
        *((COPY, 1), (COMPRESS, 1), (COMPRESS, 2), (FUSED, 1), (FUSED, 2))
    }
    assert all(row["entries_per_s"] > 0 for row in report["rows"])
    whats = [claim["what"] for claim in report["claims"]]
    assert whats[:2] == [f"{COMPRESS} / {COPY}", f"{FUSED} / {COPY}"]
    assert all(claim["holds"] == (claim["ratio"] >= claim["least"]) for claim in report["claims"])
    assert "10⁶ entries/s" in result.output


def test_ratios_are_medians_within_rounds() -> None:
    """A round in which the machine was slow for both sides is as good as any other."""
    assert times(1.0, 10.0, 2.0).ratio(times(3.0, 30.0, 8.0)) == 3.0


def test_claims_compare_entries_per_second() -> None:
    one = {COPY: 1.0, COMPRESS: 2.0, FUSED: 20.0, MX_FP4: 11.0}
    measured = {(name, 1): times(second) for name, second in one.items()}
    measured[COMPRESS, 2] = times(1.0)
    claims = {claim.what: claim for claim in kernels.claims_of(measured)}

    assert claims[f"{COMPRESS} / {COPY}"].ratio == 0.5
    assert claims[f"{COMPRESS} / {MX_FP4}"].ratio == 5.5
    assert claims[f"{COMPRESS}, 2 threads / 1"].ratio == 2.0
    assert all(claim.holds for claim in claims.values() if COMPRESS in claim.what[:8])
    assert not claims[f"{FUSED} / {COPY}"].holds
    rows = {(row.operation, row.threads): row for row in kernels.rows_of(measured, 100)}
    assert rows[COMPRESS, 2].entries_per_s == 100.0
    assert rows[COMPRESS, 2].share_of_copy == 1.0
    assert rows[FUSED, 1].cores == 2.0


def test_an_all_reduce_is_the_sum_of_its_shares() -> None:
    """Eight ranks: 1 + 8 / 8 + 7/8 · 8 + 1 = 10 copies."""
    one = {COPY: 1.0, STATISTICS: 1.0, COMPRESS: 8.0, FUSED: 8.0, DECOMPRESS: 1.0}
    claims = kernels.claims_of({(name, 1): times(second) for name, second in one.items()})
    (whole,) = [claim for claim in claims if "all-reduce" in claim.what]
    assert whole.ratio == pytest.approx(1.4)
    assert "(10.0)" in whole.what


def test_passes_of_a_rotation_are_claimed_one_by_one() -> None:
    """2^24 points take two passes of 2^8 and two of 2^4."""
    one = {COPY: 1.0, COMPRESS: 1.0, FUSED: 1.0, LOAD: 8.0, STORE: 20.0}
    measured = {(name, 1): times(second) for name, second in one.items()}
    claims = {claim.what: claim for claim in kernels.claims_of(measured, 1 << 24)}
    assert claims[f"{LOAD}, each of 4 passes / {COPY}"].ratio == 0.5
    assert claims[f"{LOAD}, each of 4 passes / {COPY}"].holds
    assert not claims[f"{STORE}, each of 4 passes / {COPY}"].holds


@pytest.mark.parametrize("recipe", kernels.RECIPES)
def test_every_recipe_is_timed(recipe: str) -> None:
    compressor = kernels.RECIPES[recipe](4)
    assert set(kernels.operations(torch.ones(4096), compressor)) >= {COPY, *kernels.SHARES}


def test_a_peer_is_timed_beside_the_cast_that_gives_its_bytes() -> None:
    peers = ["mxfp8_e4m3", "mxfp6_e3m2"]
    chosen = kernels.operations(torch.ones(4096), kernels.RECIPES["paper"](4), peers)
    steps = {f"{peer} {step}" for peer in peers for step in (COMPRESS, FUSED, DECOMPRESS)}
    assert steps <= set(chosen)

    compress, cast = f"mxfp8_e4m3 {COMPRESS}", kernels.MX_FP8
    one = {COPY: 1.0, COMPRESS: 1.0, FUSED: 1.0, compress: 2.0, cast: 9.0}
    claims = kernels.claims_of({(name, 1): times(second) for name, second in one.items()})
    (claim,) = [claim for claim in claims if cast in claim.what]
    assert (claim.what, claim.ratio, claim.least) == (f"{compress} / {cast}", 4.5, 4.0)


def test_without_torchao_there_are_no_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert kernels.mx_casts(torch.ones(256)) == {}
