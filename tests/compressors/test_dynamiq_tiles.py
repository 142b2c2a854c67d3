"""Every tile of every message holds what its cuts say, whatever the data and the calls before."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq import Butterfly, Call, DynamiQCompressor, Layout, Message, Ring, State
from dynamiq.compressors.dynamiq.memory import LEAST_OBSERVED, OBSERVATIONS
from dynamiq.kernels.supergroups.wire import supergroup_bytes
from tests.contracts.compressor import uneven_bounds

RECIPES = {
    "paper": DynamiQCompressor.paper,
    "rotated": DynamiQCompressor.rotated,
    "local": DynamiQCompressor.local,
    "every width": lambda bits: DynamiQCompressor.local(bits, widths=(1, 2, 3, 4, 8, 10, 16)),
    "one width": lambda bits: DynamiQCompressor.paper(max(bits, 4.7), widths=(4,)),
    "dropping": lambda bits: DynamiQCompressor.rotated(bits, drop_energy=0.01, energy_power=0.5),
}


@st.composite
def energies(draw, units):
    """Return float32[units] energies over many decades, with zeros and what is not a number."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 1.0, 8.0, 20.0]))
    e = (spread * torch.randn(units, generator=generator)).exp().clamp(2.0**-126, 2.0**120)
    e[torch.rand(units, generator=generator) < draw(st.sampled_from([0.0, 0.02, 0.5, 1.0]))] = 0.0
    for value in draw(st.lists(st.sampled_from([torch.inf, torch.nan]), max_size=3)):
        e[draw(st.integers(0, units - 1))] = value
    return e.to(torch.bfloat16).float()


@st.composite
def cases(draw):
    n = draw(st.sampled_from([2, 3, 4, 5, 8]))
    numel = draw(st.one_of(st.integers(1, 20_000), st.integers(1, 1_200_000)))
    gather = draw(st.booleans())
    bounds = uneven_bounds(numel, n) if not gather or draw(st.booleans()) else None
    layout = Layout(numel, n, 256, bounds)
    bits = draw(st.sampled_from([2.75, 3.5, 4.0, 5.0, 6.3, 9.0, 20.0]))
    compressor = RECIPES[draw(st.sampled_from(sorted(RECIPES)))](bits)
    schedule = draw(st.sampled_from([Ring(), Butterfly()])).schedule(n)
    spectra = [draw(energies(layout.units)) for _ in range(draw(st.integers(1, 3)))]
    return compressor, layout, schedule, gather, spectra


def decided(compressor, layout, schedule, call, energy, state):
    """Return the encoding of a call with these energies, and the state after it."""
    parts = [energy, torch.zeros_like(energy)] if compressor.means else [energy]
    if compressor.hop_aware and layout.units >= LEAST_OBSERVED:
        parts.append(torch.zeros(OBSERVATIONS))
    encoding = compressor.encode(torch.cat(parts), layout, schedule, call, state)
    rank = schedule.world_size - 1
    start, stop = layout.slice_bounds(rank)
    work = encoding.load(torch.zeros(layout.numel), rank, torch.zeros(layout.numel))
    work.stored = torch.zeros(layout.numel if call.gather else stop - start)
    return encoding, compressor.next_state(encoding, work)


@given(cases())
def test_no_tile_overflows(case):
    compressor, layout, schedule, gather, spectra = case
    state = State()
    for number, energy in enumerate(spectra):
        call = Call(0, number, gather=gather)
        encoding, state = decided(compressor, layout, schedule, call, energy, state)
        hops = range(len(schedule.hops) if gather else len(schedule.hops) - 1)
        for hop in hops:
            for chunk in range(schedule.world_size):
                check(encoding, Message(chunk, 0, 1, hop))


def check(encoding, message):
    everything = range(encoding.positions)
    tiles, quantizer = encoding._tiles(message, everything), encoding.quantizer
    sizes = torch.tensor([supergroup_bytes(w, quantizer.group_scales) for w in quantizer.widths])
    cuts = torch.nn.functional.pad(tiles.cuts, (0, 1))
    assert (cuts[:, :-1] >= cuts[:, 1:]).all(), "widths descend"
    used = ((cuts[:, :-1] - cuts[:, 1:]) * sizes).sum(1)
    assert (used <= tiles.offsets.diff()).all()
    assert (cuts[:, 0] <= (tiles.units >= 0).sum(1)).all()
    assert not (tiles.offsets % 2).any()
    assert tiles.offsets[-1] - tiles.offsets[0] == tiles.nbytes
    # Segments are parts of the whole.
    parts = [encoding.payload_bytes(message, range(a, a + 1)) for a in everything]
    assert parts == [(b - a).item() for a, b in pairwise(tiles.offsets)]


@given(cases())
def test_messages_stay_within_the_budget(case):
    """All hops of all chunks together, statistics and observations included."""
    compressor, layout, schedule, gather, spectra = case
    state = State()
    for number, energy in enumerate(spectra):
        call = Call(0, number, gather=gather)
        encoding, state = decided(compressor, layout, schedule, call, energy, state)
        everything, n = range(encoding.positions), schedule.world_size
        sent = sum(
            hop.transfers * encoding.payload_bytes(Message(chunk, 0, hop.summed, h), everything)
            for h, hop in enumerate(schedule.hops)
            if gather or hop.reduce
            for chunk in range(n)
        )
        passes = 2 if gather else 1
        statistics = compressor.statistics_bytes * layout.units
        observes = compressor.hop_aware and layout.units >= LEAST_OBSERVED
        statistics += 2 * OBSERVATIONS if observes else 0
        # Statistics cross twice even where there is no all-gather.
        sent += 2 * (n - 1) * statistics
        least = supergroup_bytes(compressor.widths[0], compressor.group_scales) * layout.units
        ceiling = max(compressor.bit_budget * 32 * layout.units * passes, 0.0)
        ceiling = max(ceiling, 2 * statistics + passes * least)
        assert sent <= (n - 1) * ceiling * (1 + 1e-12)
