"""Recipes that learn from call to call, in a pipeline: with a key, without one, and verified."""

import pytest
import torch

from dynamiq import (
    Butterfly,
    Call,
    DynamiQCompressor,
    ErrorFeedback,
    InputError,
    Ring,
    State,
    THCCompressor,
    Uncompressed,
)
from dynamiq.core.metrics import simulate
from tests.integrations.worlds import rank_of, run_world, same

RECIPES = [DynamiQCompressor.rotated(4.0), DynamiQCompressor.local(4.0)]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=["rotated", "local"])
CALLS = 3


def repeat(key, **options):
    """Return what a rank does: reduce its entries a few times under a key."""

    def run(pipeline):
        x = options["gradients"][rank_of(pipeline)]
        results = []
        for _ in range(CALLS):
            results.append(x.clone())
            pipeline.all_reduce(results[-1], "sum", key=key)
        return results, pipeline.metrics()

    return run


@pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)
@every_recipe
def test_calls_with_a_key_are_the_simulated_ones(gradients, recipe, topology):
    """All ranks hold the same bits, which are those of the lockstep driver with its states."""
    x = gradients[:4, :40_000]
    outcomes = run_world(
        repeat("bucket", gradients=x), 4, compressor=recipe, topology=topology, min_numel=0
    )
    states = None
    for number in range(CALLS):
        expected = simulate(x, recipe, topology, Call(0, number), states)
        states = expected.states
        assert same([results[number] for results, _ in outcomes], expected.result)
    assert states[0].shared, "something was learned"


@every_recipe
def test_calls_without_a_key_are_all_first_calls(gradients, recipe):
    x = gradients[:2, :20_000]
    outcomes = run_world(repeat(None, gradients=x), 2, compressor=recipe, min_numel=0)
    for number in range(CALLS):
        expected = simulate(x, recipe, Ring(), Call(0, number), [State()] * 2)
        assert same([results[number] for results, _ in outcomes], expected.result)


@every_recipe
def test_the_predicted_error_is_beside_the_measured_one(gradients, recipe):
    x = gradients[:4, :200_000]
    options = {"compressor": recipe, "verify_every": 3, "min_numel": 0}
    for _, metrics in run_world(repeat("bucket", gradients=x), 4, **options):
        assert metrics.verified_calls == 1
        assert metrics.predicted_vnmse == pytest.approx(metrics.vnmse, rel=0.25)


def test_a_format_that_predicts_nothing_has_no_prediction(gradients):
    x = gradients[:2, :20_000]

    def run(pipeline):
        pipeline.all_reduce(x[rank_of(pipeline)].clone(), "sum")
        return pipeline.metrics()

    options = {"compressor": Uncompressed("bf16"), "verify_every": 1, "min_numel": 0}
    for metrics in run_world(run, 2, **options):
        assert metrics.vnmse > 0
        assert metrics.predicted_vnmse is None


@every_recipe
def test_a_call_that_is_not_finite_teaches_nothing(gradients, recipe):
    """The next call is as if it had not been, but for its number."""
    x = gradients[:2, :20_000]
    spoiled = x.clone()
    spoiled[1, 7_000] = torch.nan

    def run(pipeline):
        mine = [t[rank_of(pipeline)].clone() for t in (x, spoiled, x)]
        for tensor in mine:
            pipeline.all_reduce(tensor, "sum", key="bucket")
        return mine

    outcomes = run_world(run, 2, compressor=recipe, min_numel=0)
    first = simulate(x, recipe, Ring(), Call(0, 0))
    third = simulate(x, recipe, Ring(), Call(0, 2), first.states)
    for results in outcomes:
        assert results[1].isnan().sum() == 256
        assert same([results[2]], third.result)


@pytest.mark.parametrize(
    "recipe",
    [
        ErrorFeedback(DynamiQCompressor.paper(5, rounding="nearest")),
        THCCompressor.uniform(error_feedback=True),
    ],
    ids=lambda recipe: recipe.kind,
)
def test_a_key_for_another_size_is_refused_before_anything_is_sent(gradients, recipe):
    """And the pipeline goes on: all ranks are told alike."""

    def use(pipeline):
        x = gradients[rank_of(pipeline), :20_000].clone()
        pipeline.all_reduce(x.clone(), key="bucket")
        with pytest.raises(InputError, match=r"9000 entries came with the key 'bucket'.* 20000"):
            pipeline.all_reduce(x[:9000].clone(), key="bucket")
        pipeline.all_reduce(x[:9000].clone(), key="other")
        pipeline.all_reduce(x, key="bucket")
        return x.sum().item()

    results = run_world(use, 2, compressor=recipe, min_numel=0)
    assert results[0] == results[1]
