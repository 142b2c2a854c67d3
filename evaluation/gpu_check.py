"""All that needs a GPU, once: bits, memory errors, all-reduces, rooflines; one JSON, one table.

Run it as ``scripts/gpu-check``, which finds an interpreter with what this needs. Each step is a
command of its own and passes, fails, or could not run, for a reason that is given. Exit status: 0
if all passed, 1 if one failed, 3 if none failed but one could not run.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal
from xml.etree import ElementTree

import torch
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
BUDGET_S = 285
"""Of all steps together."""
ROOFLINE_ENTRIES = 1 << 26  # 256 MiB: more than any GPU's cache
CLI = "from dynamiq.cli.main import app; app()"

Status = Literal["passed", "failed", "not run"]


@dataclass(frozen=True)
class Outcome:
    """How a step ended.

    Attributes:
        name: What was checked.
        status: "not run" if nothing was executed, for whatever reason.
        why: Counts, the reason why nothing ran, or the end of what a failed command printed.
        took_s: Seconds.
    """

    name: str
    status: Status
    why: str
    took_s: float


@dataclass(frozen=True)
class Step:
    """One check.

    Attributes:
        name: What is checked.
        arguments: Of pytest.
        under: A program, with its arguments, under which Python runs.
        missing: Says why the step cannot run here; "" if it can.
        limit_s: Seconds after which it has failed.
    """

    name: str
    arguments: tuple[str, ...]
    under: tuple[str, ...] = ()
    missing: Callable[[], str] = field(default=lambda: "")
    limit_s: float = 120


def no_gpu() -> str:
    """Return why there is no GPU."""
    if torch.cuda.is_available():
        return ""
    return "no CUDA device: torch.cuda.is_available() is False"


def sanitizer() -> str | None:
    """Return the path of compute-sanitizer; None if it is not there."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:{home}/bin")


def no_sanitizer() -> str:
    """Return why compute-sanitizer cannot run."""
    if sanitizer() is None:
        return no_gpu() or "compute-sanitizer is neither on PATH nor in $CUDA_HOME/bin"
    return no_gpu()


def kernel_tests() -> list[str]:
    """Return the files with tests of kernels on a GPU; others need packages an image may lack."""
    paths = sorted((ROOT / "tests" / "kernels").glob("test_*.py"))
    return [str(path) for path in paths if "pytest.mark.gpu" in path.read_text("utf-8")]


def steps(folder: Path) -> list[Step]:
    """Return all checks, the most telling first."""
    # An image's own packages may warn of anything.
    gpu = ("-m", "gpu", "-p", "no:cacheprovider", "-W", "default")
    watched = (sanitizer() or "compute-sanitizer", "--error-exitcode", "86")
    some = "copy or statistics or store or 2-bits or 4-bits or 8-bits"
    principal = f"hadamard-carry or FP32 and ({some} or mx or hadamard)"
    benchmark = (
        *("tests/benchmarks/test_kernels.py", "-k", principal),
        *("-p", "no:cacheprovider", "-W", "default"),
        *("--kernel-device", "cuda", "--kernel-entries", str(ROOFLINE_ENTRIES)),
        *("--benchmark-json", str(folder / "kernels.json"), "--benchmark-quiet"),
    )
    all_reduce = "tests/test_pipeline_gpu.py"
    return [
        Step("host and GPU give the same bits", (*gpu, *kernel_tests()), missing=no_gpu),
        Step(
            "four processes all-reduce over Gloo", (*gpu, all_reduce, "-k", "gloo"), missing=no_gpu
        ),
        Step("one process all-reduces over NCCL", (*gpu, all_reduce, "-k", "nccl"), missing=no_gpu),
        Step("roofline", benchmark, missing=no_gpu),
        Step(
            "compute-sanitizer finds nothing",
            (*gpu, "tests/kernels/test_gpu.py", "-k", "small", "--timeout", "0"),
            under=watched,
            missing=no_sanitizer,
        ),
    ]


def run(step: Step, left_s: float, folder: Path) -> Outcome:
    """Run a step, in what is left of the time."""
    if why := step.missing():
        return Outcome(step.name, "not run", why, 0.0)
    if left_s <= 0:
        return Outcome(step.name, "not run", f"the {BUDGET_S} s for all steps were used up", 0.0)
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    command = [*step.under, sys.executable, "-m", "pytest", "-q", f"--junitxml={results}"]
    began = time.monotonic()
    try:
        process = subprocess.run(
            [*command, *step.arguments],
            cwd=ROOT,
            timeout=min(left_s, step.limit_s),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        status, why = judged(process.returncode, process.stdout, results)
    except subprocess.TimeoutExpired as late:
        status, why = "failed", f"not done within {late.timeout:.0f} s"
    return Outcome(step.name, status, why, time.monotonic() - began)


def judged(returncode: int, output: str, results: Path) -> tuple[Status, str]:
    """Return how pytest ended: that nothing failed is no success if nothing ran."""
    if returncode not in (0, 5) or not results.exists():  # 5: no test was selected
        return "failed", f"exit status {returncode}: {output.strip()[-1500:]}"
    skipped: Counter[str] = Counter()
    passed = 0
    for case in ElementTree.parse(results).iter("testcase"):
        skip = case.find("skipped")
        if skip is None:
            passed += 1
        else:
            skipped[skip.get("message", "skipped")] += 1
    reasons = "; ".join(f"{count} skipped: {reason}" for reason, count in skipped.items())
    if not passed:
        return "not run", reasons or "no test was selected"
    return "passed", "; ".join(filter(None, [f"{passed} passed", reasons]))


def roofline(folder: Path) -> tuple[str, list[Any]]:
    """Return the report on what was measured, with predictions if they can be made."""
    measured = folder / "kernels.json"
    if not measured.exists():
        return "", []
    base = [sys.executable, "-c", CLI, "roofline", str(measured)]
    for command in ([*base, "--predict", "H200"], base):
        both = [
            subprocess.run([*command, *how], cwd=ROOT, capture_output=True, text=True, check=False)
            for how in ([], ["--json"])
        ]
        if not any(process.returncode for process in both):
            return both[0].stdout, json.loads(both[1].stdout)
    return both[0].stderr, []


def machine() -> dict[str, Any]:
    """Return what the outcomes depend on."""
    there = torch.cuda.is_available()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name() if there else None,
        "capability": list(torch.cuda.get_device_capability()) if there else None,
    }


def table(outcomes: list[Outcome], about: dict[str, Any]) -> Table:
    """Return one line per step."""
    title = ", ".join(f"{name} {value}" for name, value in about.items())
    result = Table("check", "", "s", "", title=title, title_justify="left")
    for outcome in outcomes:
        result.add_row(outcome.name, outcome.status, f"{outcome.took_s:.0f}", outcome.why)
    return result


def exit_status(outcomes: list[Outcome]) -> int:
    """Return 0, 1 or 3, as the module says."""
    found = {outcome.status for outcome in outcomes}
    return 1 if "failed" in found else 3 if "not run" in found else 0


def main(
    output: Annotated[
        Path, typer.Option(envvar="OUT", help="Folder for gpu-check.json and gpu-check.txt.")
    ] = Path("build/gpu-check"),
) -> None:
    """Run every check that needs a GPU; exits with 1 if one failed, 3 if one could not run."""
    output = output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    (output / "kernels.json").unlink(missing_ok=True)
    console = Console(record=True)
    ends = time.monotonic() + BUDGET_S
    outcomes = []
    for step in steps(output):
        outcomes.append(run(step, ends - time.monotonic(), output))
        print(f"{outcomes[-1].status:8} {step.name}", file=sys.stderr)
    report, rows = roofline(output)
    about = machine()
    console.print(table(outcomes, about))
    if report:
        console.print(report)
    status = exit_status(outcomes)
    document = {
        "machine": about,
        "exit_status": status,
        "steps": [asdict(outcome) for outcome in outcomes],
        "roofline": rows,
    }
    (output / "gpu-check.json").write_text(json.dumps(document, indent=2) + "\n")
    (output / "gpu-check.txt").write_text(console.export_text())
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
