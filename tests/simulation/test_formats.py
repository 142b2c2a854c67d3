"""Formats by name, and options as text."""

import pytest

from dynamiq.compressors import (
    DynamiQCompressor,
    MXCompressor,
    OmniReduceCompressor,
    THCCompressor,
    Uncompressed,
)
from dynamiq.core.errors import ConfigurationError
from dynamiq.simulation import formats
from dynamiq.simulation.formats import FORMATS, Format, build, parse_option

PAPER = DynamiQCompressor.paper


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", Uncompressed("bf16")),
        ("omnireduce", OmniReduceCompressor()),
        ("omnireduce-topk", OmniReduceCompressor(mode="topk", bit_budget=4.5)),
        ("mxfp8_e4m3", MXCompressor("mxfp8_e4m3")),
        ("mxfp8_e5m2", MXCompressor("mxfp8_e5m2")),
        ("mxfp6_e3m2", MXCompressor("mxfp6_e3m2")),
        ("mxfp6_e2m3", MXCompressor("mxfp6_e2m3")),
        ("mxfp4_e2m1", MXCompressor("mxfp4_e2m1")),
        ("paper", PAPER(4.5)),
        ("paper-stochastic", PAPER(4.5, rounding="stochastic")),
        ("paper-nearest", PAPER(4.5, rounding="nearest")),
        ("local", DynamiQCompressor.local(4.5)),
        ("rotated", DynamiQCompressor.rotated(4.5)),
        ("thc", THCCompressor.uniform()),
        ("thc-table", THCCompressor.table()),
        ("default", DynamiQCompressor(bit_budget=4.5)),
    ],
)
def test_names_stand_for(name, expected):
    assert build(name, 4.5) == expected


def test_no_name_is_left_out_above():
    assert len(FORMATS) == 16


def test_options_change_fields():
    made = build("paper", 5.0, {"widths": [2, 4, 8, 16], "epsilon_4": 0.2})
    assert made == PAPER(5.0, widths=(2, 4, 8, 16), epsilon_4=0.2)
    assert build("paper-nearest", 5.0, {"rounding": "stochastic"}) == PAPER(rounding="stochastic")


def test_unknown_names_list_what_there_is():
    with pytest.raises(ConfigurationError, match="no format is named 'papr'; there are bf16"):
        build("papr", 5.0)
    with pytest.raises(ConfigurationError, match=r"no option 'width'; there are .*, widths"):
        build("paper", 5.0, {"width": 4})
    for reserved in ("kind", "bit_budget"):
        with pytest.raises(ConfigurationError, match=f"no option '{reserved}'; there are format$"):
            build("bf16", 5.0, {reserved: 4})


def test_values_are_checked_by_the_compressor():
    with pytest.raises(ConfigurationError, match="rounding='up'"):
        build("paper", 5.0, {"rounding": "up"})
    with pytest.raises(ConfigurationError, match=r"a budget of 1.0 bits per entry cannot be met"):
        build("paper", 1.0)


def test_a_recipe_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "later", Format(recipe="later"))
    with pytest.raises(ConfigurationError, match="has no recipe 'later' in this version"):
        build("later", 5.0)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("x=0.25", 0.25),
        ("x=4", 4),
        ("x=2,4,8", [2, 4, 8]),
        ("x=[2, 4]", [2, 4]),
        ("x=nearest", "nearest"),
        ("x=None", None),
        ("x=null", None),
        ("x=true", True),
        ("x=False", False),
        ("x=a=b", "a=b"),
    ],
)
def test_options_are_read(text, value):
    name, found = parse_option(text)
    assert (name, found, type(found)) == ("x", value, type(value))


@pytest.mark.parametrize("text", ["", "x", "x=", "=3"])
def test_options_without_name_or_value_are_refused(text):
    with pytest.raises(ConfigurationError, match="an option is name=value, got"):
        parse_option(text)
