"""The operations' tests under sanitizers, and the line coverage of the kernels' sources.

    scripts/test --sanitize [PYTEST ARGUMENT...]

Kernels are compiled with AddressSanitizer and UndefinedBehaviorSanitizer, which end the tests at
the first error, and count how often every line runs. First for this CPU, then without AVX-512 and
AVX2, so that the portable parts run and give the same bits. A line is covered if one build runs it.
"""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from dynamiq.core.errors import KernelError
from dynamiq.kernels.host import find_compiler
from dynamiq.kernels.registry import SOURCE

# Of every family; emulated kernels are not the host's.
TESTS = [
    *sorted(str(path) for path in Path(__file__).parent.glob("*/test_[!e]*.py")),
    "tests/compressors/test_golden.py",
]
TARGETS = ["native", "x86-64-v2"] if platform.machine() == "x86_64" else ["native"]
FLAGS = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all --coverage"
LEAST_PERCENT = 95.0

Counts = Counter[tuple[str, int]]
"""How often each line of each file ran."""


def main(arguments: list[str]) -> int:
    """Run the tests with every build; print the coverage. Return 0 if all is well."""
    counts: Counts = Counter()
    for target in TARGETS:
        print(f"Kernels compiled with -march={target} {FLAGS}", flush=True)
        with tempfile.TemporaryDirectory(prefix="dynamiq-sanitize-") as folder:
            if status := run_tests(Path(folder), target, arguments):
                return status
            counts.update(read_counts(Path(folder)))
    lines, percent = report(counts)
    print(*lines, sep="\n")
    if percent < LEAST_PERCENT:
        print(f"{percent:.1f} % of the lines is less than {LEAST_PERCENT} %")
    return int(percent < LEAST_PERCENT)


def run_tests(folder: Path, target: str, arguments: list[str]) -> int:
    """Run the tests with kernels made for a target; notes and counts of lines go to the folder."""
    runtime = asan_runtime()
    compiler = folder / "compiler"
    # A folder for each library's counts; and the compiler itself is fast enough only as it is.
    compiler.write_text(
        f"#!/bin/sh\nunset LD_PRELOAD\n"
        f'exec {shlex.join(find_compiler())} "$@" -dumpdir "$(mktemp -d {folder}/XXXXXX)/"\n'
    )
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "DYNAMIQ_CACHE": str(folder / "cache"),
        "DYNAMIQ_HOST_FLAGS": f"{FLAGS} -march={target}",
        "LD_PRELOAD": runtime,
        # Python frees little at its end. An abort shows the test that ran.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    }
    # The sanitizers write to the process's own stderr.
    options = ["-q", "-x", "--capture=sys", "--hypothesis-profile=sanitize"]
    command = [sys.executable, "-m", "pytest", *options, *TESTS, *arguments]
    return subprocess.run(command, env=environment, check=False).returncode


def asan_runtime() -> str:
    """Return the libraries that have to be loaded before all others.

    The second one because the first looks for it at once, and aborts at a C++ exception of torch's
    if it was not there yet.

    Raises:
        KernelError: The compiler has none.
    """
    paths = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [*find_compiler(), f"-print-file-name={name}"]
        paths.append(subprocess.check_output(command, text=True).strip())
        if not Path(paths[-1]).is_file():
            raise KernelError(
                f"{shlex.join(command)} finds no such library; name a GCC in CXX (Debian and "
                f"Ubuntu: apt-get install g++)"
            )
    return " ".join(paths)


def read_counts(folder: Path) -> Counts:
    """Return what the libraries counted, of the kernels' sources only."""
    gcov = shutil.which("gcov")
    if gcov is None:
        raise KernelError("no gcov on PATH; it comes with GCC")
    counts: Counts = Counter()
    for data in sorted(folder.glob("*/*.gcda")):
        command = [gcov, "--json-format", "--stdout", str(data)]
        text = subprocess.run(command, check=True, capture_output=True, cwd=folder).stdout
        counts.update(counts_of(map(json.loads, text.splitlines())))
    return counts


def counts_of(reports: Iterable[Any]) -> Counts:
    """Return the counts in gcov's reports, lines that never ran included."""
    counts: Counts = Counter()
    for one in reports:
        for file in one["files"]:
            path = Path(one["current_working_directory"], file["file"])
            if path.is_relative_to(SOURCE):
                for line in file["lines"]:
                    counts[path.name, line["line_number"]] += line["count"]
    return counts


def report(counts: Counts) -> tuple[list[str], float]:
    """Return one line per file with what never ran, and the percentage of lines that ran."""
    lines = [f"{'file':40} {'lines':>6} {'ran':>7}  never ran"]
    for name in sorted({name for name, _ in counts}):
        numbers = sorted(number for file, number in counts if file == name)
        never = [number for number in numbers if not counts[name, number]]
        ran = 100 * (1 - len(never) / len(numbers))
        lines.append(f"{name:40} {len(numbers):6} {ran:5.1f} %  {', '.join(spans(never))}".rstrip())
    ran = sum(count > 0 for count in counts.values())
    percent = 100 * ran / max(len(counts), 1)
    lines.append(f"{'all':40} {len(counts):6} {percent:5.1f} %")
    return lines, percent


def spans(numbers: list[int]) -> Iterator[str]:
    """Yield runs of consecutive numbers, from ascending ones: 3, 7-9."""
    # Within a run, number and position differ by the same.
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *_, last = [number for _, number in run] * 2
        yield str(first) if first == last else f"{first}-{last}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
