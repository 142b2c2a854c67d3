"""The sanitizer tier, as far as it can be checked without running it."""

from collections import Counter
from pathlib import Path

import pytest

from dynamiq.core.errors import KernelError
from dynamiq.kernels.registry import SOURCE
from tests.kernels import sanitize

ROOT = Path(__file__).parents[2]


def gcov(**counts):
    """Return gcov's report on one file; the names of counts are L and a line's number."""
    lines = [{"line_number": int(name[1:]), "count": count} for name, count in counts.items()]
    return {"current_working_directory": "/", "files": [{"file": "wire.cuh", "lines": lines}]}


def in_sources(report):
    return {**report, "current_working_directory": str(SOURCE)}


def test_a_line_counts_if_any_library_ran_it():
    reports = [in_sources(gcov(L3=0, L4=0, L5=2)), in_sources(gcov(L3=1, L4=0))]
    assert sanitize.counts_of(reports) == {
        ("wire.cuh", 3): 1,
        ("wire.cuh", 4): 0,
        ("wire.cuh", 5): 2,
    }


def test_other_files_do_not_count():
    assert not sanitize.counts_of([gcov(L1=1)])


def test_the_report_says_what_never_ran():
    counts = Counter({("a.cuh", n): int(n not in {2, 5, 6, 7}) for n in range(1, 11)})
    counts["b.cu", 1] = 9
    lines, percent = sanitize.report(counts)
    assert percent == pytest.approx(100 * 7 / 11)
    assert lines[1].split() == ["a.cuh", "10", "60.0", "%", "2,", "5-7"]
    assert lines[2].split() == ["b.cu", "1", "100.0", "%"]
    assert lines[3].split() == ["all", "11", "63.6", "%"]


def test_nothing_measured_is_not_enough():
    assert sanitize.report(Counter())[1] < sanitize.LEAST_PERCENT


@pytest.mark.parametrize(("ran", "status"), [(94, 1), (95, 0)])
def test_too_little_coverage_fails(ran, status, monkeypatch, capsys):
    counts = Counter({("a.cuh", n): int(n < ran) for n in range(100)})
    monkeypatch.setattr(sanitize, "run_tests", lambda *_: 0)
    monkeypatch.setattr(sanitize, "read_counts", lambda _: counts)
    assert sanitize.main([]) == status
    assert ("is less than 95.0 %" in capsys.readouterr().out) == bool(status)


def test_tests_that_fail_end_the_run(monkeypatch):
    monkeypatch.setattr(sanitize, "run_tests", lambda *_: 3)
    assert sanitize.main([]) == 3


def test_the_tests_are_there():
    assert all((ROOT / path).is_file() for path in sanitize.TESTS)


def test_a_compiler_without_the_runtime_is_named(tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho libasan.so\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(
        KernelError, match=r"compiler -print-file-name=libasan\.so .*apt-get install"
    ):
        sanitize.asan_runtime()
