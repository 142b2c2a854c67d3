"""Each step of the ablation has what its name says, and nothing else."""

import pytest

from dynamiq.compressors import DynamiQCompressor
from dynamiq.core.errors import ConfigurationError
from dynamiq.simulation.ablation import steps
from dynamiq.simulation.measurement import Case, Effort, measure
from dynamiq.simulation.worlds import AllChunks
from dynamiq.topologies import Ring

CHANGES = [
    {"epsilon_4": 0.3, "epsilon_8": 0.08},
    {"widths": [2, 4, 8], "bit_budget": 4.0},
    {"group_scales": "stochastic"},
    {"rounding": "correlated"},
    {"rounding": "dithered"},
    {"widths": list(range(2, 11))},
    {"allocation": "exact"},
    {"hop_aware": True},
    {"widths": list(range(1, 11))},
]


def test_each_step_changes_what_its_name_says():
    found = [compressor.to_dict() for compressor in steps().values()]
    assert found[0] == {
        **DynamiQCompressor.paper(4.1875).to_dict(),
        "widths": [4],
        "rounding": "stochastic",
        "group_scales": None,
        "epsilon_4": 0.0,
        "epsilon_8": 0.0,
    }
    for before, after, change in zip(found, found[1:], CHANGES, strict=False):
        assert {**before, **change} == after
        assert before != after


def test_the_recipes_are_among_them():
    found = steps(3.5)
    assert found["correlated rounding: paper"] == DynamiQCompressor.paper(3.5)
    assert list(found.values())[-2:] == [
        DynamiQCompressor.local(3.5),
        DynamiQCompressor.rotated(3.5),
    ]


@pytest.mark.parametrize(("bits", "width"), [(2.8, 2), (3.5, 2), (4.0, 4), (7.9, 4), (8.0, 8)])
def test_one_width_is_the_widest_within_the_budget(bits, width):
    first, second = list(steps(bits).values())[:2]
    assert first.widths == second.widths == (width,)


def test_a_budget_that_is_too_small_is_refused():
    with pytest.raises(ConfigurationError, match=r"a budget of 2\.0 bits per entry cannot be met"):
        steps(2.0)


def test_on_gradients_the_ideas_help(gradients):
    world = AllChunks(gradients[:4, :30_000].contiguous())
    rows = [
        measure(world, Case(name, compressor, Ring(), 4.0), Effort(seeds=2, hops=False))
        for name, compressor in steps().items()
    ]
    errors = [row.vnmse for row in rows]
    assert errors[:7] == sorted(errors[:7], reverse=True)
    assert [row.bits_per_entry for row in rows[:2]] == pytest.approx([4.1875] * 2, abs=0.01)
    assert all(3.9 < row.bits_per_entry <= 4.0 for row in rows[2:])
    assert min(errors) == errors[-1] < errors[4] / 5
