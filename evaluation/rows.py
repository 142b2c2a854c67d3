"""Finished runs as rows of JSON, in a file that several processes may add to.

A run that is interrupted leaves no row and is done again from its start; a finished one is never
done twice.
"""

import fcntl
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from evaluation.records import Record

S = TypeVar("S", bound=Record)


class RunRow(Record):
    """A finished run.

    Attributes:
        settings: all that decides the run; rows with equal settings are one run.
    """

    settings: Record


R = TypeVar("R", bound=RunRow)


def run_missing(
    every: Iterable[S], path: Path, kind: type[R], run: Callable[[S], R]
) -> Iterator[R]:
    """Do the runs that a file of rows lacks, adding each to it; yields them."""
    # All are made before the first starts: what is wrong with one shows now.
    for settings in list(every):
        # Read anew each time: another process may be adding to the file.
        if settings.model_dump_json() not in {
            row.settings.model_dump_json() for row in read_rows(path, kind)
        }:
            row = run(settings)
            append_row(path, row)
            yield row


def read_rows(path: Path, kind: type[R]) -> list[R]:
    """Return the finished rows of a file, none if there is no such file.

    A last line without an end is what a crash left of a row, and no row.
    """
    if not path.exists():
        return []
    *lines, _ = path.read_text("utf-8").split("\n")
    return [kind.model_validate_json(line) for line in lines]


def append_row(path: Path, row: Record) -> None:
    """Add a row to a file, completely or not at all; several processes may do so at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read()
        # Cuts off what a crash left of a row, which would swallow this one.
        file.seek(content.rfind(b"\n") + 1)
        file.truncate()
        file.write(f"{row.model_dump_json()}\n".encode())
        file.flush()
        os.fsync(file.fileno())


@cache  # the code in use is that of the start, whatever is committed during a long series
def commit() -> str:
    """Return the commit of the code, with "-dirty" if files differ; empty outside a checkout."""
    command = ["git", "--no-optional-locks", "describe"]
    command += ["--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""  # no git
    return done.stdout.strip()
