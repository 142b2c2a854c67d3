"""The table of errors: every row is measured, and the JSON says the same."""

import json
from pathlib import Path

import typer
from typer.testing import CliRunner


def test_table_and_json(tmp_path: Path) -> None:
    from evaluation import vnmse

    app = typer.Typer()
    app.command()(vnmse.main)
    gradients = Path(__file__).parents[1] / "data" / "smollm2_gradients.safetensors"
    output = tmp_path / "rows.json"
    result = CliRunner().invoke(app, [str(gradients), "--seeds", "1", "--output", str(output)])
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())
    assert [row["compressor"] for row in rows[:2]] == ["BF16", "BF16"]
    assert {row["topology"] for row in rows} == {"ring", "butterfly"}
    for row in rows:
        assert row["bits_per_entry"] <= (16 if row["compressor"] == "BF16" else 5)
        assert 0 < row["vnmse"] < 1e-2
    assert "butterfly" in result.output
