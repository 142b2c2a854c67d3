"""What the commands of ``evaluation`` share: how they refuse, and how they end."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console

from evaluation.interruption import Interrupted, interruptions_raise
from evaluation.launch import WorkerError
from evaluation.namespaces import NetworkError
from evaluation.reviews import MissingDataError


def refuse(reason: str) -> NoReturn:
    """End the command, which was used wrongly."""
    sys.stderr.write(f"error: {reason}\n")
    raise typer.Exit(2)


def first_line(error: Exception) -> str:
    """Return pydantic's first complaint without its frame, or the message as it is."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])
    return str(error).splitlines()[0]


def check_folder(option: str, folder: Path) -> None:
    """Make a folder for results, or refuse one that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse(f"{option} {folder}: cannot write there: {error.strerror}")


@contextmanager
def failures_in_words() -> Iterator[None]:
    """Turn signals, and what can go wrong with hosts, ranks and data, into a line and a code."""
    errors = Console(stderr=True)
    try:
        with interruptions_raise():
            yield
    except Interrupted as interrupted:
        errors.print(f"[red]interrupted ({interrupted}); everything was stopped and removed[/]")
        raise typer.Exit(interrupted.exit_code) from None
    except (WorkerError, NetworkError, MissingDataError, OSError) as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
