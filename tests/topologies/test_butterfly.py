"""What is the butterfly's own: ⌈log₂ n⌉ rounds each way, for every number of ranks."""

from math import ceil, log2

import pytest

from dynamiq.core.message import Message
from dynamiq.core.topology import Step
from dynamiq.topologies import Butterfly
from tests.contracts import topology as contract


@pytest.mark.parametrize("n", range(1, 34))
def test_rounds_and_depth_are_logarithmic(n):
    rounds = ceil(log2(n))

    assert all(len(Butterfly().steps(n, rank)) == 2 * rounds for rank in (0, n // 2, n - 1))
    assert contract.depth(Butterfly(), n) <= rounds + 1


@pytest.mark.parametrize("rounds", [1, 2, 3, 4, 5, 6])
def test_a_power_of_two_compresses_as_often_as_recursive_halving(rounds):
    assert contract.depth(Butterfly(), 2**rounds) == rounds + 1


@pytest.mark.parametrize(
    ("n", "transfers"),
    [
        (2, {1: 1}),
        (3, {1: 2}),
        (5, {1: 3, 2: 1}),
        (6, {1: 3, 2: 2}),
        (7, {1: 4, 2: 1, 3: 1}),
        (8, {1: 4, 2: 2, 4: 1}),
        (12, {1: 6, 2: 3, 4: 2}),
        (64, {1: 32, 2: 16, 4: 8, 8: 4, 16: 2, 32: 1}),
    ],
)
def test_how_often_sums_of_k_ranks_cross_a_link(n, transfers):
    *reduce, _ = Butterfly().hops(n)

    assert {hop.summed: hop.transfers for hop in reduce} == transfers


def test_a_round_mixes_sums_of_different_numbers_of_ranks():
    second = Butterfly().steps(7, 0)[1]

    assert [m.summed for m in second.sends] == [2, 1]


def test_three_ranks_written_out():
    assert Butterfly().steps(3, 0) == (
        Step(2, (Message(2, 0, 1, 0),), 1, (Message(0, 1, 1, 0),), True),
        Step(1, (Message(1, 0, 1, 0),), 2, (Message(0, 2, 1, 0),), True),
        Step(2, (Message(0, 0, 3, 1),), 1, (Message(1, 1, 3, 1),), False),
        Step(1, (Message(0, 0, 3, 1),), 2, (Message(2, 2, 3, 1),), False),
    )
