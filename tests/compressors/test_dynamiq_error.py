"""How large the error of an all-reduce is: as simulated independently, and on real gradients."""

import os

import numpy as np
import pytest
import torch
from safetensors import safe_open

from dynamiq import Butterfly, DynamiQCompressor, Ring, measure_error
from tests.compressors.simulation import Recipe, all_reduce

TOPOLOGIES = {"ring": Ring(), "butterfly": Butterfly()}
FULL = "DYNAMIQ_TEST_GRADIENTS"

every_topology = pytest.mark.parametrize("topology", TOPOLOGIES)


def synthetic(world_size, supergroups, seed=0):
    """Return float32[n, d] like gradients: correlated ranks, scales over many decades."""
    generator = np.random.default_rng(seed)
    scale = np.exp(0.8 * generator.normal(size=(supergroups, 1, 1)))
    scale = scale * np.exp(0.7 * generator.normal(size=(supergroups, 16, 1)))
    shape = (supergroups, 16, 16)
    shared = 0.5 * generator.normal(size=shape) + 0.1
    rows = [(shared + generator.normal(size=shape)) * scale for _ in range(world_size)]
    return torch.from_numpy(np.stack(rows).reshape(world_size, -1).astype(np.float32))


def mean_error(gradients, compressor, topology, seeds):
    reports = [
        measure_error(gradients, compressor, TOPOLOGIES[topology], seed=seed)
        for seed in range(seeds)
    ]
    assert all(report.bits_per_entry <= compressor.bit_budget * (1 + 1e-12) for report in reports)
    return sum(report.vnmse for report in reports) / seeds


def mean_simulated_error(gradients, recipe, seeds):
    x = gradients.double().numpy().reshape(len(gradients), -1, 256)
    exact = x.sum(0)
    errors = [all_reduce(x, recipe, seed) - exact for seed in range(seeds)]
    return np.mean([np.square(e).sum() for e in errors]) / np.square(exact).sum()


@pytest.mark.parametrize("rounding", ["stochastic", "correlated"])
@pytest.mark.parametrize(
    ("topology", "world_size"), [("ring", 3), ("ring", 8), ("butterfly", 5), ("butterfly", 8)]
)
def test_error_is_the_simulated_one(topology, world_size, rounding):
    gradients = synthetic(world_size, 64 * world_size)
    ours = mean_error(gradients, DynamiQCompressor.paper(rounding=rounding), topology, 2)
    recipe = Recipe(rounding=rounding, topology=topology)
    assert ours == pytest.approx(mean_simulated_error(gradients, recipe, 2), rel=0.07)


@pytest.mark.parametrize(
    ("bit_budget", "widths"), [(2.6875, (2, 4, 8)), (3, (1, 2, 4, 8)), (6, (2, 4, 8))]
)
def test_error_at_other_budgets_is_the_simulated_one(bit_budget, widths):
    gradients = synthetic(3, 64 * 3, seed=1)
    compressor = DynamiQCompressor.paper(bit_budget, widths=widths, rounding="stochastic")
    ours = mean_error(gradients, compressor, "ring", 2)
    simulated = mean_simulated_error(gradients, Recipe(bit_budget, widths), 2)
    assert ours == pytest.approx(simulated, rel=0.07)


def test_more_bits_give_less_error():
    gradients = synthetic(4, 200)
    errors = [
        measure_error(gradients, DynamiQCompressor.paper(bits), Ring()).vnmse
        for bits in (2.6875, 3, 4, 5, 6, 8, 8.6875)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < errors[0] / 100


@pytest.mark.parametrize("budget", [8.6875, 100.0])
def test_a_budget_beyond_the_widest_width_is_not_used_up(budget):
    gradients = synthetic(4, 40)
    report = measure_error(gradients, DynamiQCompressor.paper(budget), Ring())
    assert report.bits_per_entry == 8.6875


@every_topology
def test_correlated_rounding_is_better_on_real_gradients(gradients, topology):
    errors = {
        rounding: mean_error(gradients, DynamiQCompressor.paper(rounding=rounding), topology, 1)
        for rounding in ("stochastic", "correlated")
    }
    assert errors["correlated"] < 0.85 * errors["stochastic"]


CASES = [
    ("ring", "stochastic", 4.7e-3, 6.0e-3),
    ("butterfly", "stochastic", 2.6e-3, 3.5e-3),
    ("ring", "correlated", 3.1e-3, 4.0e-3),
    ("butterfly", "correlated", 1.9e-3, 2.6e-3),
]
"""Topology, rounding, and the largest vNMSE at 5 bits of the sample and of the full gradients."""


@pytest.mark.parametrize(("topology", "rounding", "most", "_"), CASES)
def test_error_on_a_sample_of_real_gradients(gradients, topology, rounding, most, _):
    assert mean_error(gradients, DynamiQCompressor.paper(rounding=rounding), topology, 2) <= most


@pytest.mark.soak
@pytest.mark.parametrize(("topology", "rounding", "_", "most"), CASES)
def test_error_on_real_gradients(topology, rounding, _, most):
    if FULL not in os.environ:
        pytest.skip(f"{FULL} does not name a safetensors file with gradients: bfloat16[8, d]")
    with safe_open(os.environ[FULL], "pt") as file:
        gradients = file.get_tensor("gradients")
    assert mean_error(gradients, DynamiQCompressor.paper(rounding=rounding), topology, 5) <= most
