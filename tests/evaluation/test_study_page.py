"""The study's page: differences of pairs, their scatter, and nothing compared that differs."""

import math
from pathlib import Path

import pytest

from evaluation.rows import append_row, read_rows
from evaluation.study import page as page_module
from evaluation.study.__main__ import main
from evaluation.study.aggregate import Estimate, rank_correlation, sections
from evaluation.study.page import write_page
from evaluation.study.records import (
    Checkpoint,
    ErrorSample,
    Evaluation,
    Row,
    Settings,
)


def row(
    recipe: str = "uncompressed",
    loss: float = 2.0,
    *,
    seed: int = 0,
    bits: float | None = None,
    error: float = 0.0,
    accuracy: float | None = None,
    optimizer: str = "adamw",
    steps: int = 100,
) -> Row:
    settings = Settings.model_validate(
        {
            "workload": "questions" if accuracy else "language_model",
            "recipe": recipe,
            "bits": bits,
            "compressor": None,
            "topology": "ring",
            "optimizer": optimizer,
            "learning_rate": 0.1,
            "steps": steps,
            "seed": seed,
        }
    )
    adam = 3 * error if optimizer == "adamw" else None
    return Row(
        settings=settings,
        checkpoints=(
            Checkpoint(step=steps // 2, held_out=Evaluation(loss=9.0, accuracy=accuracy)),
            Checkpoint(step=steps, held_out=Evaluation(loss=loss, accuracy=accuracy)),
        ),
        training_loss=loss + 0.5,
        errors=(
            ErrorSample(step=0, vnmse=error, weighted=2 * error, adam=adam),
            ErrorSample(step=10, vnmse=3 * error, weighted=6 * error, adam=adam),
        ),
        bits_per_entry=bits or 32,
        training_s=1800,
        versions={"torch": "2.13.0"},
        commit="abc",
    )


@pytest.fixture
def rows() -> list[Row]:
    """Three seeds that differ by much more than the recipes do."""
    pairs = [
        [
            row(loss=loss, seed=seed),
            row("paper", loss + 0.10 + 0.01 * seed, seed=seed, bits=4, error=0.01),
            row("paper", loss + 0.20, seed=seed, bits=3, error=0.04),
            row("rotated", loss + 0.05, seed=seed, bits=3, error=0.002),
        ]
        for seed, loss in enumerate((2.0, 3.0, 2.5))
    ]
    return [each for pair in pairs for each in pair]


class TestAggregate:
    def test_each_run_is_held_against_its_seeds_uncompressed_one(self, rows: list[Row]) -> None:
        (section,) = sections(rows)
        lines = {(line.recipe, line.bits): line for line in section.lines}
        assert list(lines) == [("paper", 4), ("paper", 3), ("rotated", 3)]
        increase = lines["paper", 4].loss_increase
        assert increase.mean == pytest.approx(0.11)
        assert increase.error == pytest.approx(0.01 / math.sqrt(3))
        assert lines["rotated", 3].training_loss_increase.mean == pytest.approx(0.05)
        assert lines["paper", 4].seeds == (0, 1, 2)
        assert lines["paper", 4].vnmse == pytest.approx(0.02)
        assert lines["paper", 4].weighted == pytest.approx(0.04)
        assert lines["paper", 4].adam == pytest.approx(0.03)
        assert lines["paper", 4].accuracy_increase is None

    def test_rows_in_another_order_say_the_same(self, rows: list[Row]) -> None:
        def table(given: list[Row]) -> set[tuple[object, ...]]:
            (section,) = sections(given)
            return {(line.recipe, line.bits, line.loss_increase) for line in section.lines}

        assert table(rows) == table(rows[::-1])

    def test_accuracies_are_compared_where_there_are_any(self) -> None:
        (section,) = sections(
            [row(accuracy=0.87), row("paper", 2.1, bits=4, accuracy=0.85, error=0.1)]
        )
        assert section.lines[0].accuracy_increase == Estimate(pytest.approx(-0.02), None)

    @pytest.mark.parametrize("change", [{"optimizer": "sgd"}, {"steps": 50}])
    def test_what_cannot_be_compared_is_not(
        self, rows: list[Row], change: dict[str, object]
    ) -> None:
        other = row("paper", 9.0, bits=4, **change)
        first, second = sections([*rows, other])
        assert first == sections(rows)[0]
        assert second.lines == []
        assert second.unpaired == [other.settings.label]

    def test_a_run_that_is_there_twice_is_refused(self, rows: list[Row]) -> None:
        changed = rows[1].settings.model_copy(update={"compressor": {"kind": "other"}})
        again = rows[1].model_copy(update={"settings": changed})
        with pytest.raises(ValueError, match="paper 4 bits seed 0"):
            sections([*rows, again])


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3, 4], [10, 20, 40, 30], 0.8),
        ([1, 2, 3], [9, 4, 1], -1),
        ([1, 1, 2], [1, 2, 3], math.sqrt(3) / 2),
        ([1, 2], [1, 2], None),
        ([1, 1, 1], [1, 2, 3], None),
    ],
)
def test_rank_correlation(x: list[float], y: list[float], expected: float | None) -> None:
    assert rank_correlation(x, y) == (None if expected is None else pytest.approx(expected))


class TestPage:
    @pytest.fixture(autouse=True)
    def matplotlib(self) -> None:
        pytest.importorskip("matplotlib", reason="not installed: matplotlib (the extra `study`)")

    def test_tables_picture_and_origin(self, rows: list[Row], tmp_path: Path) -> None:
        sgd = [row(optimizer="sgd"), row("paper", 2.2, bits=3, error=0.01, optimizer="sgd")]
        page = tmp_path / "study.md"
        picture = write_page([*rows, *sgd], page, "python -m evaluation.study page rows.jsonl")
        text = page.read_text()
        assert picture == tmp_path / "study.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "](study.png)" in text
        assert text.count("\n## ") == 3
        assert "Uncompressed: loss 2.5000 ± 0.2887 (seeds: 3)" in text
        line = "| paper | 4.00 | 3 | +0.1100 ± 0.0058 | +0.1100 ± 0.0058 |  | 2.00e-02 | 4.00e-02 |"
        assert line in text
        assert "| paper | 3.00 | 1 | +0.2000 | +0.2000 |  | 2.00e-02 | 4.00e-02 |  |" in text
        assert text.count("no rank correlation") == 2
        assert "14 runs, 7.0 hours of training steps, at abc, with torch 2.13.0" in text
        assert "    python -m evaluation.study page rows.jsonl\n" in text

    def test_a_correlation_needs_several_rows_of_several_seeds(self, tmp_path: Path) -> None:
        exact = [row(seed=seed) for seed in (0, 1)]
        runs = [
            row("paper", 2 + 0.1 * bits, seed=seed, bits=bits, error=0.01 * bits)
            for bits in (3, 4, 5, 6, 7, 8)
            for seed in (0, 1)
        ]
        alone = row("local", 9.0, bits=3, error=1e-9)
        write_page([*exact, *runs, alone], tmp_path / "study.md", "")
        text = (tmp_path / "study.md").read_text()
        assert "vNMSE 1.00, weighted error 1.00, Adam's error 1.00 (6 rows)." in text
        write_page([*exact, *runs[2:], alone], tmp_path / "study.md", "")
        assert "no rank correlation" in (tmp_path / "study.md").read_text()

    def test_the_page_is_what_its_rows_give(self, tmp_path: Path) -> None:
        results = Path(__file__).parents[2] / "docs" / "results"
        rows = "docs/results/study/rows.jsonl"
        command = f"python -m evaluation.study page {rows} --output docs/results/study.md"
        write_page(read_rows(results / "study" / "rows.jsonl", Row), tmp_path / "study.md", command)
        assert (tmp_path / "study.md").read_text() == (results / "study.md").read_text()

    def test_the_command_writes_it(
        self,
        rows: list[Row],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(page_module, "_draw", lambda *_: None)  # drawn above already
        source, page = tmp_path / "rows.jsonl", tmp_path / "page.md"
        for each in rows:
            append_row(source, each)
        main(["page", str(source), "--output", str(page)])
        assert f"python -m evaluation.study page {source} --output {page}" in page.read_text()
        assert capsys.readouterr().out == f"{page} and {tmp_path / 'page.png'}\n"

    def test_without_rows_there_is_no_page(self, tmp_path: Path) -> None:
        with pytest.raises(SystemExit, match="no rows"):
            main(["page", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "page.md")])
        assert list(tmp_path.iterdir()) == []
