"""The exponential levels: the formula of DynamiQ §3.3, and numbers that must never change."""

import pytest
import torch

from dynamiq.compressors.dynamiq.quantizers import exponential_levels

GOLDEN = {
    (1, 0.0): {0: 0.0, 1: 1.0},
    (2, 0.0): {0: 0.0, 1: 1.0},
    (2, 0.3): {0: 0.0, 1: 1.0},
    (4, 0.0): {1: 1 / 7, 3: 3 / 7, 6: 6 / 7},
    (4, 0.3): {
        0: 0.0,
        1: 0.0823619994,
        2: 0.1795491586,
        3: 0.2942300065,
        4: 0.4295534070,
        5: 0.5892350197,
        6: 0.7776593226,
        7: 1.0,
    },
    (4, 0.23): {1: 0.1035437550, 2: 0.2180424393, 5: 0.6394844846, 7: 1.0},
    (8, 0.08): {1: 0.00317671742, 2: 0.00639409682, 64: 0.3119439373, 126: 0.9842252, 127: 1.0},
}


@pytest.mark.parametrize(("width", "epsilon"), GOLDEN)
def test_golden_numbers(width, epsilon):
    levels = exponential_levels(width, epsilon)
    for index, value in GOLDEN[width, epsilon].items():
        assert levels[index] == pytest.approx(value, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("epsilon", [0.0, 1e-9, 1e-3, 0.08, 0.23, 0.3, 1.0, 2.0])
def test_levels(width, epsilon):
    """R + 1 float32 numbers from 0 to 1, the further apart the larger."""
    levels = exponential_levels(width, epsilon)

    assert len(levels) == 2 ** (width - 1)
    assert (levels[0], levels[-1]) == (0.0, 1.0)
    table = torch.tensor(levels)
    assert table.tolist() == list(levels), "representable in float32"
    gaps = table.diff()
    assert (gaps > 0).all() or epsilon >= 1  # they underflow
    assert (gaps[1:] >= gaps[:-1] * (1 - 1e-4)).all()


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("epsilon", [0.05, 0.3])
def test_formula(width, epsilon):
    top = 2 ** (width - 1) - 1
    base = 1 + 2 * epsilon**2
    for r, level in enumerate(exponential_levels(width, epsilon)):
        assert level == pytest.approx((base**r - 1) / (base**top - 1), rel=1e-6)


@pytest.mark.parametrize("width", [4, 8])
def test_a_vanishing_epsilon_is_uniform(width):
    for small, none in zip(
        exponential_levels(width, 1e-6), exponential_levels(width, 0.0), strict=True
    ):
        assert small == pytest.approx(none, rel=1e-6)
