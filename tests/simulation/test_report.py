"""Tables and pictures hold the rows' numbers."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from dynamiq.core.errors import InputError
from dynamiq.simulation import plot, report
from dynamiq.simulation.row import HopRow, Row

HOPS = (HopRow(1, 1, True, None, 4.875, 1e-4), HopRow(2, 1, False, 3.5, 4.875, 3e-4))
ROW = Row(
    *("paper", {}, "ring", 8, 1000, False, 5.0, 3, 1.234e-3, 5.6e-5, 0.0123, 0.0004),
    *(2.5e-2, 4.9876, 123_456.0, 1.3e-3, HOPS),
)
LIMIT = {4.0: 1e-4, 5.0: 2.5e-5}


def printed(renderable):
    console = Console(width=80, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def cells(text, first):
    """Return the words of all lines that begin with one."""
    return [line.split()[1:] for line in text.splitlines() if line.strip().startswith(first)]


class TestSummary:
    def test_holds_every_figure(self):
        text = printed(report.summary([ROW]))
        assert "ring, 8 ranks, 1000 entries each, 3 seeds" in text
        assert cells(text, "paper") == [
            ["1.23e-03", "6e-05", "1.30e-03", "1.2%±0.0%", "2.50e-02", "4.988", "123"]
        ]
        assert "hops of the ring: paper, 5 bits" in text
        assert cells(text, "reduce") == [["1", "1", "–", "4.875", "1.00e-04", "25%"]]
        assert cells(text, "gather") == [["2", "1", "3.50", "4.875", "3.00e-04", "75%"]]

    def test_what_is_not_known_is_a_dash(self):
        row = replace(
            ROW,
            **dict.fromkeys(("bias", "bias_error", "predicted_vnmse", "vnmse_spread")),
            hops=(),
            seeds=1,
        )
        text = printed(report.summary([row, replace(row, bias=-1e-5, topology="butterfly")]))
        first, second = cells(text, "paper")
        assert (first[1], first[2], first[3], second[3]) == ("–", "–", "–", "0.0%")
        assert "butterfly, 8 ranks, 1000 entries each, 1 seed" in text
        assert "hops of" not in text

    def test_budgets_are_told_apart(self):
        rows = [replace(ROW, bit_budget=budget) for budget in (3.0, 4.5, None)]
        asked = [line[0] for line in cells(printed(report.summary(rows)), "paper")]
        assert asked == ["3", "4.5", "–"]

    def test_orders_of_the_ranks_have_a_spread_of_their_own(self):
        text = printed(report.summary([replace(ROW, orders=4, order_spread=7.8e-4)]))
        assert "3 seeds, 4 orders of the ranks" in text
        assert cells(text, "paper")[0][:3] == ["1.23e-03", "6e-05", "8e-04"]

    def test_one_chunk_is_said_to_be_one(self):
        text = printed(report.summary([replace(ROW, one_chunk=True)]))
        assert "1000 entries in the chunk that stands for all" in text

    def test_of_many_hops_some_are_shown(self):
        hops = tuple(HopRow(k, 1, k < 100, None, 4.0, 1e-4) for k in range(1, 101))
        text = printed(report.summary([replace(ROW, hops=hops)]))
        shown = [int(line[0]) for line in cells(text, "reduce") + cells(text, "gather")]
        assert shown == [1, 2, 4, 8, 16, 32, 64, 99, 100]


def test_an_ablation_compares_each_row_with_the_one_before():
    rows = [replace(ROW, compressor="first"), replace(ROW, compressor="then", vnmse=6.17e-4)]
    other = replace(ROW, compressor="first", topology="butterfly")
    text = printed(report.ablation([*rows, other]))
    assert cells(text, "first") == [["1.23e-03", "6e-05", "4.988"]] * 2
    assert cells(text, "then") == [["6.17e-04", "6e-05", "0.50", "4.988"]]


class TestSweep:
    rows = (
        replace(ROW, bit_budget=4.0, vnmse=1e-2, bits_per_entry=3.99),
        ROW,
        replace(ROW, compressor="bf16", bit_budget=None, vnmse=1e-5, bits_per_entry=16.0),
        replace(ROW, topology="butterfly", vnmse=7e-4),
    )

    def test_bits_down_and_compressors_across(self):
        text = printed(report.sweep(self.rows, LIMIT))
        assert cells(text, "4 ") == [["1.00e-02", "–", "1.00e-04"], ["–", "1.00e-04"]]
        assert cells(text, "5 ") == [["1.23e-03", "–", "2.50e-05"], ["7.00e-04", "2.50e-05"]]
        assert cells(text, "16 ") == [["–", "1.00e-05", "–"]]

    @pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
    def test_is_drawn(self, tmp_path, suffix, magic):
        path = tmp_path / f"sweep{suffix}"
        plot.draw(self.rows, LIMIT, path)
        assert path.read_bytes().startswith(magic)

    def test_the_picture_names_every_curve(self, tmp_path, monkeypatch):
        import matplotlib as mpl

        monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
        plot.draw(self.rows, LIMIT, tmp_path / "sweep.svg")
        words = re.findall(r">([^<>]+)</text>", (tmp_path / "sweep.svg").read_text())
        assert {
            *("paper, ring", "paper, butterfly", "bf16, ring: 16 bits", "rate-distortion limit"),
            *("vNMSE of the sum", "8 ranks, 1000 entries"),
        } <= set(words)

    def test_a_folder_that_is_not_there_is_named(self):
        with pytest.raises(InputError, match=r"none/sweep.svg cannot be written: No such file"):
            plot.draw(self.rows, LIMIT, Path("none/sweep.svg"))

    def test_without_matplotlib_it_says_what_to_install(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(InputError, match=r"pip install 'dynamiq-allreduce\[simulate\]'"):
            plot.draw(self.rows, LIMIT, tmp_path / "sweep.png")
