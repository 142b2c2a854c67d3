"""What one call decides from its statistics: bytes, widths, centring, range."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq import Butterfly, DynamiQCompressor, Ring, measure_error
from dynamiq.core.collective import Collective
from dynamiq.core.compressor import State
from dynamiq.core.drivers import lockstep
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call
from tests.contracts.compressor import same_bits, sample, uneven_bounds

WIDTHS = [(2, 4, 8), (1, 2, 4, 8, 16), (4,), (16,), (1, 8)]


def encoding(compressor, energies, means=None, *, world_size=2, numel=None, bounds=None):
    """Return the encoding of a call whose supergroups have these energies and means."""
    energies = torch.as_tensor(energies, dtype=torch.float32)
    means = torch.zeros_like(energies) if means is None else torch.as_tensor(means).float()
    numel = 256 * energies.numel() if numel is None else numel
    layout = Layout(numel, world_size, 256, bounds)
    statistics = torch.cat([energies, world_size * means] if compressor.means else [energies])
    schedule = Ring().schedule(world_size)
    return compressor.encode(statistics, layout, schedule, Call(), State())


def widths(encoding):
    """Return the width of every supergroup by its index in the padded bucket."""
    units, bits = encoding.decision.units.flatten(), encoding.widths_of_hop(0).flatten()
    found = dict(zip(units.tolist(), bits.tolist(), strict=True))
    found.pop(-1, None)
    return [found[unit] for unit in sorted(found)]


@given(
    numel=st.integers(1, 60_000),
    world_size=st.integers(2, 9),
    widths=st.sampled_from(WIDTHS),
    extra=st.floats(0, 6),
    bounded=st.booleans(),
)
def test_bytes_stay_within_the_budget(numel, world_size, widths, extra, bounded):
    """Over all ranks, statistics included; one message by less than one widest supergroup."""
    least = DynamiQCompressor.paper(17, widths=widths).minimum_bit_budget
    budget = least + extra
    compressor = DynamiQCompressor.paper(budget, widths=widths)
    bounds = uneven_bounds(numel, world_size) if bounded else None
    layout = Layout(numel, world_size, 256, bounds)
    units = layout.units
    made = encoding(
        compressor, torch.ones(units), world_size=world_size, numel=numel, bounds=bounds
    )
    everything = range(made.positions)
    schedule = Ring().schedule(world_size)
    sizes = [made.payload_bytes(schedule.gather_message(c), everything) for c in range(world_size)]

    per_supergroup = budget * 32 - 4
    assert sum(sizes) <= per_supergroup * units * (1 + 1e-12)
    for chunk, size in enumerate(sizes):
        own = -(-layout.slice_numel(chunk) // 256) if bounded else -(-(units - chunk) // world_size)
        assert size < per_supergroup * own + 512


@pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)
@pytest.mark.parametrize("bit_budget", [2.6875, 3.3, 5, 7.1])
@pytest.mark.parametrize(
    ("world_size", "numel"), [(2, 1), (3, 255), (5, 257), (8, 4097), (7, 9000)]
)
def test_bits_that_cross_links_stay_within_the_budget(topology, world_size, numel, bit_budget):
    compressor = DynamiQCompressor.paper(bit_budget)
    report = measure_error(sample(world_size, numel), compressor, topology)
    assert 0 < report.bits_per_entry <= bit_budget * (1 + 1e-12)


def test_the_budget_is_used():
    report = measure_error(sample(4, 100_000), DynamiQCompressor.paper(), Ring())
    assert report.bits_per_entry > 4.99


def test_zero_supergroups_cost_nothing_and_free_their_bits():
    compressor = DynamiQCompressor.paper(4.0)
    energies = [2.0**-k for k in range(8)]
    crowded = widths(encoding(compressor, energies))
    relieved = widths(encoding(compressor, [e for e in energies for e in (e, 0.0, 0.0)]))
    assert relieved[1::3] == relieved[2::3] == [0] * 8
    assert relieved[::3] == [8] * 8
    assert sum(crowded) <= 8 * (4 - 0.6875)


def test_an_energy_is_zero_only_if_all_entries_are():
    """The least energy that statistics can report gets bits; centring takes none to zero."""
    compressor = DynamiQCompressor.paper(3.0)
    assert widths(encoding(compressor, [1.0] * 6 + [2.0**-126, 0.0]))[6:] == [2, 0]
    # Constant supergroups: no energy is left after the mean (256 · 2 ranks · 1).
    constant = widths(encoding(compressor, [512.0] * 4, [1.0] * 4))
    assert min(constant) >= 2


@pytest.mark.parametrize("energy", ["centred", "raw"])
def test_what_the_allocation_sees(energy):
    """A supergroup that is nearly constant needs few bits once its mean is taken away."""
    compressor = DynamiQCompressor.paper(4.0, energy=energy)
    energies, means = [512.0 + 5.2] + [100.0] * 7, [1.0] + [0.0] * 7
    first, *others = widths(encoding(compressor, energies, means))
    if energy == "raw":
        assert first > min(others)
    else:
        assert first < max(others)
        assert first == min(others)


@pytest.mark.parametrize("units", [3 * 64, 3 * 64 + 1, 3 * 1100, 3 * 1100 + 2])
def test_no_chunk_is_a_straggler(units):
    """At every width all chunks have the same number of supergroups, to within one per tile."""
    generator = torch.Generator().manual_seed(0)
    energies = (4 * torch.randn(units, generator=generator)).exp()
    made = encoding(DynamiQCompressor.paper(), energies, world_size=3)
    bits = made.widths_of_hop(0)
    per_tile = torch.stack([(bits >= w).sum(2) for w in (2, 4, 8)], dim=2)
    assert (per_tile.flatten(0, 1).amax(0) - per_tile.flatten(0, 1).amin(0)).max() <= 1
    per_chunk = per_tile.sum(1)
    assert (per_chunk.amax(0) - per_chunk.amin(0)).max() <= per_tile.shape[1]


def test_widths_descend_with_the_energy():
    energies = (4 * torch.randn(96, generator=torch.Generator().manual_seed(1))).exp()
    made = encoding(DynamiQCompressor.paper(), energies, world_size=2)
    by_energy = [w for _, w in sorted(zip(energies.tolist(), widths(made), strict=True))]
    assert by_energy == sorted(by_energy)
    assert set(by_energy) == {2, 4, 8}


@pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)
@pytest.mark.parametrize("exponent", [-58, -40, -1, 1, 30, 46])
def test_a_power_of_two_changes_nothing_else(topology, exponent):
    """In the whole range in which energies are numbers of FP32, no bit of a mantissa changes."""
    x = sample(4, 3000) * 2.0**10
    compressor = DynamiQCompressor.paper()
    plain = measure_error(x, compressor, topology).result
    scaled = measure_error(x * 2.0**exponent, compressor, topology).result
    assert same_bits(scaled, plain * 2.0**exponent)


@pytest.mark.parametrize("scale", [2.0**120, 2.0**-120])
def test_values_whose_energies_saturate_are_still_quantised(scale):
    """Only the allocation loses its resolution."""
    x = torch.randn(4, 3000, generator=torch.Generator().manual_seed(2)) * scale
    assert measure_error(x, DynamiQCompressor.paper(), Ring()).vnmse < 0.03


def test_the_smallest_numbers_survive():
    x = torch.full((3, 600), 2.0**-149)
    x[1] *= 3
    out = measure_error(x, DynamiQCompressor.paper(), Ring()).result
    assert torch.equal(out, torch.full((600,), 5 * 2.0**-149))


def test_a_common_mean_costs_nothing():
    """Every rank takes away the same number, so its rounding to BF16 cancels."""
    x = torch.randn(4, 5120, generator=torch.Generator().manual_seed(3))
    compressor = DynamiQCompressor.paper()

    def error(shift):
        exact = (x + shift).double().sum(0)
        out = measure_error(x + shift, compressor, Ring()).result
        return (out.double() - exact).square().mean().item()

    for shift in (0.3, -5.0, 20.0):
        assert error(shift) == pytest.approx(error(0.0), rel=0.2)


@pytest.mark.parametrize("lazy", [torch._neg_view, lambda x: torch._efficientzerotensor(x.shape)])
def test_tensors_whose_memory_is_not_their_value(lazy):
    """Torch negates, and makes zeros, when a tensor is read; kernels read memory."""
    x = sample(2, 3000)
    rows = [lazy(row) for row in x]
    expected = measure_error(torch.stack(rows).clone(), DynamiQCompressor.paper(), Ring()).result
    layout, call = Layout(3000, 2, 256), Call()
    compressor, schedule = DynamiQCompressor.paper(), Ring().schedule(2)
    outs = [torch.empty(3000) for _ in rows]
    lockstep(
        [
            Collective(compressor, schedule, rank, layout.numel, call).run(row, outs[rank])
            for rank, row in enumerate(rows)
        ]
    )
    assert same_bits(outs[0], expected)


@pytest.mark.parametrize("chunk", [None, 1])
def test_results_can_be_stored_elsewhere_too(chunk):
    """What was written early is copied, what was not is written."""
    bounds = (0, 1300, 3000)
    made = encoding(DynamiQCompressor.paper(), [1.0] * 13, numel=3000, bounds=bounds)
    everything, message = range(made.positions), Ring().schedule(2).gather_message(1)
    x, out = torch.randn(3000), torch.empty(3000)
    work = made.load(x, 0, out)
    payload = torch.empty(made.payload_bytes(message, everything), dtype=torch.uint8)
    made.compress(work, message, everything, payload)
    made.decompress(payload, work, message, everything)
    other = torch.full((3000 if chunk is None else 1700,), torch.nan)
    made.store(work, other, chunk)
    assert same_bits(other[-1700:], out[1300:])
    if chunk is None:
        assert torch.allclose(other[:1300], x[:1300])
