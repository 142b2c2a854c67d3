"""The contract of all wire formats; a new format is added to tests/core/formats.py."""

import pytest

from dynamiq.compressors.dynamiq import order
from tests.contracts import compressor as contract
from tests.core.formats import IN_FEW, Nodes, every_schedule, few_schedules, formats


@pytest.mark.parametrize("law", contract.LAWS, ids=contract.name)
@every_schedule
@formats()
def test_contract(format, topology, law):
    law(format.compressor, topology)


@pytest.mark.parametrize("law", contract.LAWS, ids=contract.name)
@few_schedules
@formats(lambda f: f.name in IN_FEW)
def test_contract_of_some_formats(format, topology, law):
    law(format.compressor, topology)


@every_schedule
@formats()
def test_error(format, topology):
    contract.the_error_is_at_most(format.compressor, topology, format.error)


@every_schedule
@formats()
def test_non_finite_values(format, topology):
    # So that a column, too, has several units to share a budget between.
    numel = contract.NUMEL * (2 if isinstance(topology, Nodes) else 1)
    contract.a_non_finite_entry_stays_where_it_is(format.compressor, topology, format.unit, numel)
    contract.non_finite_stays_in_its_slice_of_a_reduce_scatter(
        format.compressor, topology, format.unit
    )


@every_schedule
@formats(lambda f: f.compressor.stateful)
def test_non_finite_values_do_not_reach_the_state(format, topology):
    contract.a_non_finite_call_leaves_the_state_alone(format.compressor, topology)


@every_schedule
@formats(lambda f: f.data_free)
def test_sizes(format, topology):
    contract.sizes_are_free_of_data(format.compressor, topology)


@every_schedule
@formats(lambda f: f.random)
def test_randomness(format, topology):
    contract.nothing_shares_randomness(format.compressor, topology)


@every_schedule
@formats(lambda f: f.unbiased)
def test_unbiased(format, topology):
    contract.the_mean_error_vanishes(format.compressor, topology)


@every_schedule
@formats(lambda f: "dynamiq" in f.name)
def test_segments_of_dynamiq(format, topology, monkeypatch):
    """Its positions are tiles; these are made small, so that a few supergroups fill several."""
    monkeypatch.setattr(order, "TILE", 2)
    contract.segments_do_not_change_bits(format.compressor, topology, numel=3000)
