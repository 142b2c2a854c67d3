"""What can be chosen, and what is refused with which words."""

import pytest
from pydantic import ValidationError

from dynamiq import ConfigurationError, DynamiQCompressor
from dynamiq.compressors.dynamiq.compressor import WIDTHS
from dynamiq.core.registry import compressor_registry

CHANGES = {
    "bit_budget": 4.0,
    "widths": (2, 4, 8, 16),
    "rounding": "nearest",
    "rotation": None,
    "group_scales": "up",
    "means": True,
    "allocation": "thresholds",
    "hop_aware": False,
    "energy_power": 1.0,
    "drop_energy": 1e-6,
    "epsilon_4": 0.23,
    "epsilon_8": 0.1,
}


def test_the_papers_recipe():
    """Widths {2, 4, 8}, stochastic UINT8 group scales, correlated rounding, 5 bits."""
    recipe = DynamiQCompressor.paper()
    assert recipe.to_dict() == {
        "kind": "dynamiq",
        "bit_budget": 5.0,
        "widths": [2, 4, 8],
        "rounding": "correlated",
        "rotation": None,
        "group_scales": "stochastic",
        "means": True,
        "energy": "centred",
        "allocation": "thresholds",
        "hop_aware": False,
        "energy_power": 1.0,
        "drop_energy": 0.0,
        "epsilon_4": 0.30,
        "epsilon_8": 0.08,
    }
    assert recipe == DynamiQCompressor.paper(bit_budget=5)
    other = DynamiQCompressor.paper(3, widths=(1, 2, 4), rounding="stochastic", energy="raw")
    assert (other.bit_budget, other.widths) == (3, (1, 2, 4))
    assert (other.rounding, other.energy) == ("stochastic", "raw")


@pytest.mark.parametrize(
    ("widths", "least"),
    [((2, 4, 8), 2.6875), ((1, 2), 1.6875), ((4, 8, 16), 4.6875), ((8,), 8.6875), ((16,), 16.125)],
    ids=str,
)
def test_the_least_budget(widths, least):
    """Narrowest codes, 8/16 + 16/256 for scales (16 bits have none), 32/256 for statistics."""
    recipe = DynamiQCompressor.paper(least, widths=widths)
    assert (recipe.bit_budget, recipe.minimum_bit_budget) == (least, least)
    with pytest.raises(ConfigurationError) as error:
        DynamiQCompressor.paper(least - 1e-4, widths=widths)
    for part in (f"{least - 1e-4} bits", str(widths), f"the least is {least}", "raise bit_budget"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "widths", [(), (4, 2), (2, 2), (11,), (0, 2), (2, 4, 32), (2, 4, 8, 12)], ids=str
)
def test_widths_that_do_not_exist(widths):
    with pytest.raises(ConfigurationError) as error:
        DynamiQCompressor(bit_budget=20, widths=widths)
    assert f"ascending, non-empty choice from {WIDTHS}, got {widths}" in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bit_budget": 0},
        {"bit_budget": float("nan")},
        {"bit_budget": float("inf")},
        {"rounding": "up"},
        {"group_scales": "nearest"},
        {"energy": "squared"},
        {"rotation": "fourier"},
        {"allocation": "greedy"},
        {"energy_power": 0.0},
        {"energy_power": 1.125},
        {"energy_power": 0.3},
        {"drop_energy": 1.0},
        {"drop_energy": -1e-3},
        {"epsilon_4": -0.1},
        {"epsilon_8": 2.1},
        {"bits": 5},
    ],
    ids=str,
)
def test_options_out_of_range(arguments):
    with pytest.raises((ConfigurationError, ValidationError)) as error:
        DynamiQCompressor(**arguments)
    assert next(iter(arguments)) in str(error.value)


@pytest.mark.parametrize("field", CHANGES)
def test_every_option_enters_the_digest(field):
    changed = DynamiQCompressor(**{field: CHANGES[field]})
    assert changed != DynamiQCompressor()
    assert changed.digest() != DynamiQCompressor().digest()
    assert compressor_registry.read(changed.to_dict()) == changed


def test_a_configuration_is_a_value():
    compressor = DynamiQCompressor()
    with pytest.raises(ValidationError, match="frozen"):
        compressor.bit_budget = 4.0
    assert {compressor: "found"}[DynamiQCompressor()] == "found"


def test_the_energy_left_by_a_mean_needs_the_mean():
    with pytest.raises(ConfigurationError, match="no mean is known; use means=True"):
        DynamiQCompressor(energy="centred")
    assert DynamiQCompressor(means=True, energy="centred").energy == "centred"


def test_what_the_recipes_differ_in():
    """All but the scaling is the same in ours, and each option can be set beside it."""
    local, rotated = DynamiQCompressor.local(4), DynamiQCompressor.rotated(4)
    scaling = {"rotation": None, "group_scales": "up"}
    assert local.to_dict() == {**rotated.to_dict(), **scaling}
    assert (rotated.rotation, rotated.group_scales) == ("hadamard", None)
    for recipe in (local, rotated):
        assert recipe.widths == tuple(range(1, 11))
        assert (recipe.rounding, recipe.means) == ("dithered", False)
        assert (recipe.allocation, recipe.hop_aware) == ("exact", True)
    assert DynamiQCompressor.rotated(4, hop_aware=False).hop_aware is False
    assert rotated.to_dict() == {**DynamiQCompressor(bit_budget=4).to_dict(), "energy_power": 1.0}
    assert DynamiQCompressor().energy_power == 0.5


def test_the_least_budgets_of_the_new_recipes():
    """One bit, the scales, and the BF16 energy."""
    assert DynamiQCompressor.local().minimum_bit_budget == 1 + 8 / 16 + 16 / 256 + 16 / 256
    assert DynamiQCompressor.rotated().minimum_bit_budget == 1 + 16 / 256 + 16 / 256


def test_state():
    """Hops get shares that follow from earlier calls; a call without a key does without."""
    assert not DynamiQCompressor.paper().stateful
    assert DynamiQCompressor().stateful
    assert not DynamiQCompressor().needs_key
