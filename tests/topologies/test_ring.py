"""What is the ring's own: neighbours, and 2(n - 1) rounds."""

import pytest

from dynamiq.core.message import Message
from dynamiq.core.topology import Hop, Step
from dynamiq.topologies import Ring
from tests.contracts import topology as contract


@pytest.mark.parametrize("n", [2, 3, 7, 8, 33])
def test_a_ring_has_two_times_n_minus_1_rounds_between_neighbours(n):
    for rank in range(n):
        steps = Ring().steps(n, rank)

        assert len(steps) == 2 * (n - 1)
        assert {(s.to, s.source) for s in steps} == {((rank + 1) % n, (rank - 1) % n)}
        assert {(len(s.sends), len(s.receives)) for s in steps} == {(1, 1)}


@pytest.mark.parametrize("n", [2, 3, 7, 8, 33])
def test_a_ring_compresses_n_times_in_sequence(n):
    assert contract.depth(Ring(), n) == n


def test_every_partial_sum_crosses_one_link():
    assert Ring().hops(4) == (
        Hop(1, 1, True),
        Hop(2, 1, True),
        Hop(3, 1, True),
        Hop(4, 3, False),
    )


def test_three_ranks_written_out():
    assert Ring().steps(3, 0) == (
        Step(1, (Message(2, 0, 1, 0),), 2, (Message(1, 2, 1, 0),), True),
        Step(1, (Message(1, 0, 2, 1),), 2, (Message(0, 2, 2, 1),), True),
        Step(1, (Message(0, 0, 3, 2),), 2, (Message(2, 2, 3, 2),), False),
        Step(1, (Message(2, 2, 3, 2),), 2, (Message(1, 1, 3, 2),), False),
    )
