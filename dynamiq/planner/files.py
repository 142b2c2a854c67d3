"""Profiles and plans as JSON files: written whole or not at all, read with one clear error."""

import json
import os
from pathlib import Path
from typing import Any, TypeVar

from dynamiq.core.description import Value
from dynamiq.core.errors import DynamiqError, InputError

V = TypeVar("V", bound=Value)


def read(path: Path | str, kind: type[V]) -> V:
    """Return what :func:`write` wrote.

    Raises:
        InputError: The file is missing, holds no JSON, is of another version or kind, or a field
            is refused.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no text, so no {_name(kind)}") from None
    return parse(text, kind, str(path))


def parse(text: str, kind: type[V], origin: str) -> V:
    """Return a value from JSON; ``origin`` is where it comes from, for error messages.

    Raises:
        InputError: As for :func:`read`.
    """
    try:
        data = json.loads(text, parse_constant=_refuse)
    except ValueError as error:
        raise InputError(f"{origin} holds no JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{origin} holds a JSON {type(data).__name__}, no {_name(kind)}")
    known = kind.model_fields["version"].default
    found = data.get("version")
    if found != known or isinstance(found, bool):
        raise InputError(
            f"{origin} has the version {found!r}, and this dynamiq reads {_name(kind)}s of version "
            f"{known}; make it anew with this version"
        )
    try:
        return kind(**data)
    except DynamiqError as error:
        raise InputError(f"{origin} is no {_name(kind)}: {_first(str(error))}") from None


def write(path: Path | str, value: Value) -> None:
    """Write a value as JSON, under another name first, so that no reader finds half of it.

    Raises:
        InputError: The file cannot be written.
    """
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(dump(value), "utf-8")
        part.replace(target)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror or error}") from None


def dump(value: Value) -> str:
    """Return a value as JSON, one line for each field of the outermost levels."""
    return json.dumps(value.to_dict(), indent=1) + "\n"


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _name(kind: type[Value]) -> str:
    """Return a class's name in words: "HardwareProfile" is a hardware profile."""
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in kind.__name__)
    return words.strip()


def _first(problems: str) -> str:
    """Return the first of several problems, in one line, and how many more there are."""
    first, *rest = problems.split("; ")
    return " ".join(first.split()) + (f" (and {len(rest)} more)" if rest else "")
