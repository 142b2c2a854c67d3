"""What can be chosen, and what is refused with which words."""

import pytest
from pydantic import ValidationError

from dynamiq import ConfigurationError, DynamiQCompressor
from dynamiq.core.registry import compressor_registry

CHANGES = {
    "bit_budget": 4.0,
    "widths": (2, 4, 8, 16),
    "rounding": "nearest",
    "energy": "raw",
    "scale_rounding": "up",
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
        "energy": "centred",
        "scale_rounding": "stochastic",
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
    assert DynamiQCompressor.minimum_bit_budget(widths) == least
    assert DynamiQCompressor(bit_budget=least, widths=widths).bit_budget == least
    with pytest.raises(ConfigurationError) as error:
        DynamiQCompressor(bit_budget=least - 1e-4, widths=widths)
    for part in (f"{least - 1e-4} bits", str(widths), f"the least is {least}", "raise bit_budget"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    "widths", [(), (4, 2), (2, 2), (3,), (0, 2), (2, 4, 32), (2, 4, 8, 10)], ids=str
)
def test_widths_that_do_not_exist(widths):
    with pytest.raises(ConfigurationError) as error:
        DynamiQCompressor(bit_budget=20, widths=widths)
    assert f"ascending, non-empty choice from (1, 2, 4, 8, 16), got {widths}" in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {"bit_budget": 0},
        {"bit_budget": float("nan")},
        {"bit_budget": float("inf")},
        {"rounding": "up"},
        {"scale_rounding": "nearest"},
        {"energy": "squared"},
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


def test_it_carries_no_state():
    assert not DynamiQCompressor().stateful
