"""What the commands of ``scripts/bench`` make of their options."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from evaluation.command import check_folder, first_line, refuse
from evaluation.network import Hosts, available

T = TypeVar("T")


def values(option: str, text: str, read: Callable[[str], T]) -> list[T]:
    """Return what an option lists, or refuse it."""
    try:
        return [read(word) for word in text.split(",")]
    except (ValueError, KeyError, OverflowError):
        refuse(f"{option} {text}: not a list of values that are separated by commas")


def networks(hosts: str, rates: str) -> list[tuple[int, float]]:
    """Return every number of hosts with every rate, or refuse one."""
    found = [
        (n, rate) for n in values("--hosts", hosts, int) for rate in values("--rates", rates, float)
    ]
    for n, rate in found:
        try:
            Hosts(n, rate_mbit=rate)
        except ValueError as error:
            refuse(str(error))
    return found


def build(kind: type[T], **arguments: object) -> T:
    """Return a task, or refuse what it is made from."""
    try:
        return kind(**arguments)
    except ValidationError as error:
        refuse(complaint(error))


def complaint(error: ValidationError) -> str:
    """Return the first complaint, with the name of what it is about."""
    names = [str(part) for part in error.errors()[0]["loc"]]
    return ": ".join([*names[:1], first_line(error)])


def check_output(output: Path) -> None:
    """Refuse what could only fail after minutes."""
    check_folder("--output", output)
    possible = available()
    if not possible:
        refuse(f"no slow network here: {possible.reason}")
