"""Counting instructions one by one: what it is for is that a busy machine changes nothing."""

import pytest

from tests.benchmarks.stepping import executed_per_item


def add_up(first, last):
    total = 0
    for number in range(first, last):
        total += number
    return total


def test_items_cost_what_they_cost():
    counts = [executed_per_item(add_up, some) for some in (20, 40)]
    if None in counts:
        pytest.skip("needs Linux and permission to ptrace a child")
    assert 10 < counts[0] < 1000
    assert counts[1] == pytest.approx(counts[0], rel=0.2)
