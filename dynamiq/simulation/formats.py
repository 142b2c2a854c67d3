"""The formats by the names that a command line gives them: one line each."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamiq.core.compressor import Compressor
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.registry import compressor_registry

_RESERVED = ("kind", "bit_budget")


@dataclass(frozen=True)
class Format:
    """How a compressor of that name is made.

    Attributes:
        kind: Of the class.
        recipe: The class method that makes it; None for the class itself.
        preset: What the name fixes.
        has_budget: Whether it takes a bit budget; others have the bits that they have.
    """

    kind: str = "dynamiq"
    recipe: str | None = None
    preset: Mapping[str, Any] = field(default_factory=dict)
    has_budget: bool = True


FORMATS = {
    "bf16": Format("uncompressed", preset={"format": "bf16"}, has_budget=False),
    "paper": Format(recipe="paper"),
    "paper-stochastic": Format(recipe="paper", preset={"rounding": "stochastic"}),
    "paper-nearest": Format(recipe="paper", preset={"rounding": "nearest"}),
    "local": Format(recipe="local"),
    "rotated": Format(recipe="rotated"),
    "default": Format(),
    "omnireduce": Format("omnireduce", preset={"mode": "lossless"}, has_budget=False),
    "omnireduce-topk": Format("omnireduce", preset={"mode": "topk"}),
    **{
        name: Format("mx", preset={"format": name}, has_budget=False)
        for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1")
    },
    "thc": Format("thc", has_budget=False),
    "thc-table": Format("thc", recipe="table", has_budget=False),
}


def build(name: str, bit_budget: float, options: Mapping[str, Any] | None = None) -> Compressor:
    """Return the compressor of a name.

    Args:
        name: A key of :data:`FORMATS`.
        bit_budget: Of no account for formats without one.
        options: Fields that differ from what the name says.

    Raises:
        ConfigurationError: No such name, recipe or field, or a value that is refused.
    """
    if name not in FORMATS:
        raise ConfigurationError(f"no format is named {name!r}; there are {', '.join(FORMATS)}")
    known = FORMATS[name]
    cls = compressor_registry.get(known.kind)
    fields = sorted(set(cls.model_fields) - set(_RESERVED))
    for option in options or {}:
        if option not in fields:
            raise ConfigurationError(
                f"{name} has no option {option!r}; there are {', '.join(fields)}"
            )
    make = cls if known.recipe is None else getattr(cls, known.recipe, None)
    if make is None:
        raise ConfigurationError(f"{cls.__name__} has no recipe {known.recipe!r} in this version")
    values = {**known.preset, **(options or {})}
    if known.has_budget:
        values["bit_budget"] = bit_budget
    try:
        made: Compressor = make(**values)
    except ConfigurationError as error:
        raise ConfigurationError(f"{name}: {error}") from error
    return made


def parse_option(text: str) -> tuple[str, Any]:
    """Return name and value of ``name=value``; the value is JSON, numbers with commas, or a word.

    >>> parse_option("widths=2,4,8")
    ('widths', [2, 4, 8])
    >>> parse_option("rotation=none")
    ('rotation', None)
    >>> parse_option("rounding=stochastic")
    ('rounding', 'stochastic')

    Raises:
        ConfigurationError: There is no name or no value.
    """
    name, _, value = text.partition("=")
    if not name or not value:
        raise ConfigurationError(f"an option is name=value, got {text!r}")
    if value.lower() in {"none", "true", "false"}:
        return name, {"none": None, "true": True, "false": False}[value.lower()]
    for candidate in (value, f"[{value}]"):
        try:
            return name, json.loads(candidate)
        except ValueError:
            continue
    return name, value
