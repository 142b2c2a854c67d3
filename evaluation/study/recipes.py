"""The recipes of the study by name."""

from typing import Any

from dynamiq import Compressor, DynamiQCompressor, Uncompressed

UNCOMPRESSED = "uncompressed"
# The classmethod of DynamiQCompressor, and its options beside the budget.
_BUDGETED: dict[str, tuple[str, dict[str, Any]]] = {
    "paper": ("paper", {}),
    "local": ("local", {}),
    "local-tempered": ("local", {"energy_power": 0.5}),
    "rotated": ("rotated", {}),
    "rotated-tempered": ("rotated", {"energy_power": 0.5}),
}
# "bf16" shows what the smallest of errors does to a loss: nothing below that can be told apart.
NAMES = (UNCOMPRESSED, "bf16", *_BUDGETED)


def has_budget(recipe: str) -> bool:
    """Return whether a recipe depends on the bits per entry."""
    return recipe in _BUDGETED


def compressor(recipe: str, bits: float | None) -> Compressor | None:
    """Return what a recipe's name stands for; ``None`` is the exact mean.

    Raises:
        ValueError: the name is unknown, or the recipe needs a budget and has none.
    """
    if recipe == UNCOMPRESSED:
        return None
    if recipe == "bf16":
        return Uncompressed("bf16")
    if recipe not in _BUDGETED:
        raise ValueError(f"no recipe {recipe!r}; there are {', '.join(NAMES)}")
    if bits is None:
        raise ValueError(f"the recipe {recipe!r} needs a number of bits per entry")
    name, options = _BUDGETED[recipe]
    made: Compressor = getattr(DynamiQCompressor, name)(bits, **options)
    return made
