"""Rows from pytest-benchmark's JSON, as ``tests/benchmarks/test_kernels.py`` leaves it."""

import json
from pathlib import Path
from typing import Any

from dynamiq.core.errors import InputError
from dynamiq.roofline.case import Case
from dynamiq.roofline.families import COPY, traffic
from dynamiq.roofline.row import Row
from dynamiq.roofline.traffic import UNIT

_REMEDY = "make one by: scripts/test tests/benchmarks/test_kernels.py --benchmark-json kernels.json"


def read(path: Path) -> list[Row]:
    """Return the rows of a benchmark run, in its order; benchmarks of anything else are left out.

    Raises:
        InputError: The file cannot be read, or holds no benchmark of a kernel.
    """
    try:
        benchmarks = json.loads(path.read_text("utf-8"))["benchmarks"]
        found = [b for b in benchmarks if "kernel" in b["extra_info"]]
        rows = [_row(b["extra_info"], b["stats"]["median"]) for b in found]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; {_REMEDY}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is no JSON of kernel benchmarks ({error!r}); {_REMEDY}"
        ) from error
    if not rows:
        raise InputError(f"{path} holds {len(benchmarks)} benchmarks, none of a kernel; {_REMEDY}")
    return rows


def _row(info: dict[str, Any], seconds: float) -> Row:
    """Return one row; ``seconds`` and ``copy_s`` are those of ``calls`` calls each."""
    entries, entry_format = info["entries"], info["format"]
    calls = entries * info["calls"]
    # Beside a kernel that reads no entries, float32 ones are copied.
    copy = traffic(Case(COPY, entry_format or "FP32"), units=1).moved_bytes / UNIT
    return Row(
        kernel=info["kernel"],
        format=entry_format,
        width=info["width"],
        rounding=info["rounding"],
        machine=info["device"],
        build=info["build"],
        predicted=False,
        threads=info["threads"],
        entries=entries,
        entries_per_s=calls / seconds,
        bytes_per_entry=(info["read_bytes"] + info["written_bytes"]) / entries,
        copy_bytes_per_s=calls / info["copy_s"] * copy,
        instructions_per_entry=info.get("instructions_per_entry"),
        operands=info.get("operands"),
    )
