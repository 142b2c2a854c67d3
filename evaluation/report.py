"""What a comparison of two runs comes to: a table, one sentence and a results file."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from evaluation.records import Link, Results, Run

# Step times scatter by a few per cent from run to run on a shared machine.
_SAME_TIME = 0.03


def table(reference: Run, compressed: Run) -> Table:
    """Return one row per run: traffic, where a step's time went, and what was learnt."""
    result = Table(
        caption="Means per step without the first, seen by rank 0; times in seconds.",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    result.add_column("gradients\nsent as", no_wrap=True)
    for column in (
        "MB\nsent",
        "bits per\nentry",
        "\nstep",
        "\ncompute",
        "\ncodec",
        "\nwire",
        "held-out\nloss",
        "\nvNMSE",
    ):
        result.add_column(column, justify="right", no_wrap=True)
    for run in (reference, compressed):
        times = (run.mean(column) for column in ("step_s", "compute_s", "codec_s", "wire_s"))
        result.add_row(
            run.plan.label,
            f"{run.mean('bytes_sent') / 1e6:.2f}",
            f"{run.final.bits_per_entry:.2f}",
            *(f"{seconds:.2f}" for seconds in times),
            f"{run.final.validation_loss:.3f}",
            f"{run.final.vnmse:.1e}",
        )
    return result


def sentence(reference: Run, compressed: Run, link: Link) -> str:
    """Return the conclusion in one sentence: bytes, time and loss, each as it was measured."""
    share = compressed.mean("bytes_sent") / reference.mean("bytes_sent")
    parts = [
        f"{compressed.plan.label} sent {share:.2f} times the bytes of {reference.plan.label}",
        _time(reference.mean("step_s"), compressed.mean("step_s"), link),
        _loss(reference, compressed),
    ]
    return f"{', '.join(parts[:2])}, and {parts[2]}."


def environment() -> dict[str, Any]:
    """Return what the times depend on: versions and machine."""
    packages = ("dynamiq-allreduce", "torch", "transformers", "tokenizers", "numpy")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "packages": {name: _version(name) for name in packages},
    }


def write_results(results: Results, folder: Path) -> Path:
    """Write ``results.json`` and returns its path."""
    path = folder / "results.json"
    path.write_text(results.model_dump_json(indent=1) + "\n")
    return path


def _time(reference_s: float, compressed_s: float, link: Link) -> str:
    seconds = f"({compressed_s:.2f} s against {reference_s:.2f} s)"
    ratio = compressed_s / reference_s
    if link.kind == "loopback":
        return f"no link was slowed down, so the step times {seconds} mean nothing here"
    over = f"over links of {link.measured_mbit:.1f} Mbit/s {seconds}"
    if abs(ratio - 1) <= _SAME_TIME:
        return f"a step took the same time {over}"
    if ratio < 1:
        return f"a step took {ratio:.2f} times as long {over}"
    return f"but a step took longer, {ratio:.2f} times as long, {over}"


def _loss(reference: Run, compressed: Run) -> str:
    ours, theirs = compressed.final.validation_loss, reference.final.validation_loss
    difference = round(ours, 3) - round(theirs, 3)
    values = f"({ours:.3f} against {theirs:.3f}, one seed)"
    after = f"after {len(compressed.rows)} steps the validation loss was"
    if round(difference, 3) == 0:
        return f"{after} the same {values}"
    return f"{after} {abs(difference):.3f} {'higher' if difference > 0 else 'lower'} {values}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
