"""What is direct exchange's own: everyone to everyone, in permutations, two compressions."""

import pytest

from dynamiq.core.message import Message
from dynamiq.core.topology import Hop, Step
from dynamiq.topologies import Direct
from tests.contracts import topology as contract


@pytest.mark.parametrize("n", [2, 3, 7, 8, 33])
def test_every_round_is_a_permutation(n):
    rounds = list(zip(*(Direct().steps(n, rank) for rank in range(n)), strict=True))

    assert len(rounds) == 2 * (n - 1)
    for steps in rounds:
        assert sorted(step.to for step in steps) == list(range(n))
        assert all(steps[step.to].source == rank for rank, step in enumerate(steps))
        assert {(len(s.sends), len(s.receives)) for s in steps} == {(1, 1)}


@pytest.mark.parametrize("n", [2, 3, 7, 8, 33])
def test_every_entry_is_compressed_twice(n):
    assert contract.depth(Direct(), n) == 2


def test_a_chunk_goes_straight_to_its_owner():
    for step in Direct().steps(6, 2):
        (message,) = step.sends
        assert message.chunk == (step.to if step.reduce else 2)
        assert message.sender == 2


def test_everything_crosses_n_minus_1_times():
    assert Direct().hops(6) == (Hop(1, 5, True), Hop(6, 5, False))


def test_three_ranks_written_out():
    assert Direct().steps(3, 0) == (
        Step(1, (Message(1, 0, 1, 0),), 2, (Message(0, 2, 1, 0),), True),
        Step(2, (Message(2, 0, 1, 0),), 1, (Message(0, 1, 1, 0),), True),
        Step(1, (Message(0, 0, 3, 1),), 2, (Message(2, 2, 3, 1),), False),
        Step(2, (Message(0, 0, 3, 1),), 1, (Message(1, 1, 3, 1),), False),
    )
