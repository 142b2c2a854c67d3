"""The conclusion says what the numbers say, and the files hold them."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from rich.console import Console

from dynamiq import Butterfly, DynamiQCompressor, Uncompressed
from evaluation import report
from evaluation.figure import draw_loss_vs_time
from evaluation.records import FinalRow, Link, Plan, Results, Run, StepRow, read_row

SLOW = Link(kind="namespaces", rate_mbit=25, measured_mbit=23.9)
LOOPBACK = Link(kind="loopback", why_loopback="not root")


def run(label: str, compressor, *, step_s: float, sent: int, loss: float) -> Run:
    plan = Plan(label=label, compressor=compressor, topology=Butterfly(), steps=3)
    rows = tuple(
        StepRow(
            step=step,
            loss=loss + 1 / (1 + step),
            bytes_sent=sent,
            step_s=step_s if step else 100.0,  # the first opens connections: not counted
            compute_s=1.0,
            codec_s=0.25,
            wire_s=step_s - 1.25,
            elapsed_s=step_s * (step + 1),
        )
        for step in range(3)
    )
    final = FinalRow(validation_loss=loss, vnmse=1e-3, bits_per_entry=sent / 1e6)
    return Run(plan=plan, rows=rows, final=final)


def reference() -> Run:
    return run("BF16", Uncompressed("bf16"), step_s=7.0, sent=16_000_000, loss=6.5)


def compressed(**changes: float) -> Run:
    numbers = {"step_s": 3.5, "sent": 5_000_000, "loss": 6.512} | changes
    return run("DynamiQ 5 bits", DynamiQCompressor.paper(bit_budget=5), **numbers)


def results() -> Results:
    runs = (reference(), compressed())
    return Results(
        command="scripts/demo --rate 25",
        environment=report.environment(),
        link=SLOW,
        runs=runs,
        sentence=report.sentence(*runs, SLOW),
    )


class TestSentence:
    def test_bytes_time_and_loss(self) -> None:
        assert report.sentence(reference(), compressed(), SLOW) == (
            "DynamiQ 5 bits sent 0.31 times the bytes of BF16, a step took 0.50 times as long "
            "over links of 23.9 Mbit/s (3.50 s against 7.00 s), and after 3 steps the validation "
            "loss was 0.012 higher (6.512 against 6.500, one seed)."
        )

    def test_no_time_is_claimed_that_was_not_won(self) -> None:
        said = report.sentence(reference(), compressed(step_s=8.4), SLOW)
        assert "but a step took longer, 1.20 times as long" in said

    @pytest.mark.parametrize("step_s", [6.9, 7.1])
    def test_noise_is_not_a_win(self, step_s: float) -> None:
        said = report.sentence(reference(), compressed(step_s=step_s), SLOW)
        assert "a step took the same time" in said

    def test_loopback_times_mean_nothing(self) -> None:
        said = report.sentence(reference(), compressed(), LOOPBACK)
        assert "the step times (3.50 s against 7.00 s) mean nothing here" in said
        assert "as long" not in said

    @pytest.mark.parametrize(
        ("loss", "words"),
        [(6.48, "0.020 lower"), (6.5, "the same"), (6.5004, "the same"), (6.8, "0.300 higher")],
    )
    def test_loss_in_either_direction(self, loss: float, words: str) -> None:
        assert words in report.sentence(reference(), compressed(loss=loss), SLOW)


def test_the_table_fits_a_terminal_and_shows_every_number() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(report.table(reference(), compressed()))
    text = capture.get()
    for word in ("16.00", "5.00", "7.00", "3.50", "5.75", "2.25", "6.512", "1.0e-03", "DynamiQ"):
        assert word in text
    assert "…" not in text


class TestResults:
    def test_what_is_written_reads_back(self, tmp_path: Path) -> None:
        path = report.write_results(results(), tmp_path)
        assert path.name == "results.json"
        assert Results.read(path.read_text()) == results()

    def test_the_layout_is_the_documented_one(self, tmp_path: Path) -> None:
        written = json.loads(report.write_results(results(), tmp_path).read_text())
        assert written["format"] == 1
        assert written.keys() == {
            "format", "command", "environment", "link", "runs", "sentence",
        }  # fmt: skip
        first, second = written["runs"]
        assert first["plan"]["compressor"] == {"kind": "uncompressed", "format": "bf16"}
        assert second["plan"]["compressor"]["bit_budget"] == 5
        assert first["rows"][0].keys() == {
            "kind", "step", "loss", "bytes_sent", "step_s", "compute_s", "codec_s", "wire_s",
            "elapsed_s",
        }  # fmt: skip
        assert first["final"].keys() == {"kind", "validation_loss", "vnmse", "bits_per_entry"}
        assert {"python", "cpus", "packages"} <= written["environment"].keys()

    def test_another_layout_is_refused(self) -> None:
        text = results().model_dump_json().replace('"format":1', '"format":2')
        with pytest.raises(ValidationError, match="format"):
            Results.read(text)


@pytest.mark.parametrize("row", [reference().rows[0], reference().final])
def test_a_row_crosses_the_pipe_unchanged(row: StepRow | FinalRow) -> None:
    assert read_row(row.model_dump_json()) == row


@pytest.mark.parametrize("link", [SLOW, LOOPBACK])
@pytest.mark.filterwarnings("default")  # matplotlib is not ours to keep free of them
def test_the_picture_is_drawn(link: Link, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="not installed: matplotlib (the extra `demo`)")
    path = draw_loss_vs_time(reference(), compressed(), link, tmp_path)
    assert path.name == "loss_vs_time.png"
    assert path.read_bytes().startswith(b"\x89PNG")
