"""Bytes and bits: never above the budget, thresholds as in DynamiQ §3.2, near the optimum."""

import math
from itertools import chain, combinations, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq.compressors.dynamiq.allocation import capacities, threshold_cuts

BYTES = {0: 0, 1: 50, 2: 82, 4: 146, 8: 274, 16: 512}
"""Of a supergroup, by width."""
SUBSETS = [c for k in range(1, 6) for c in combinations((1, 2, 4, 8, 16), k)]

subsets = st.sampled_from(SUBSETS)
counts = st.lists(st.integers(0, 600), max_size=20)


def widths_of(cuts, widths, size):
    """Return the width of every supergroup of a tile, 0 for none."""
    return [
        max([0, *(w for w, cut in zip(widths, cuts, strict=True) if p < cut)]) for p in range(size)
    ]


def cut(energies, capacity, widths):
    """Return the cuts of a single tile."""
    row = torch.tensor([energies], dtype=torch.float64)
    return threshold_cuts(row, torch.tensor([capacity]), widths)[0].tolist()


@given(counts, subsets, st.floats(0, 1.2))
def test_capacities(counts, widths, share):
    """Together within the budget, each enough for the narrowest width, none above the widest."""
    sizes = [BYTES[w] for w in widths]
    budget = sizes[0] + share * (sizes[-1] - sizes[0])

    tiles = capacities(counts, widths, budget)

    assert len(tiles) == len(counts)
    seen = used = 0
    for count, tile in zip(counts, tiles, strict=True):
        assert count * sizes[0] <= tile < count * sizes[-1] + 16
        seen, used = seen + count, used + tile
        assert used <= seen * budget * (1 + 1e-12)
    step = math.gcd(*(size - sizes[0] for size in sizes))
    assert used > min(budget, sizes[-1]) * seen - step - 16, "a larger sum would fit"


def test_large_tiles_are_aligned():
    for count in range(64, 90):
        assert capacities([count] * 9, (2, 4, 8), 156.3) == pytest.approx(
            [156.3 * count] * 9, abs=96
        )
        assert not any(tile % 16 for tile in capacities([count] * 9, (2, 4, 8), 156.3))


def test_capacities_are_equal_for_equal_tiles():
    tiles = capacities([512] * 8, (2, 4, 8), 5 * 32 - 4)
    assert len(set(tiles)) == 1
    assert 512 * 156 - 64 < tiles[0] <= 512 * 156


def test_capacities_carry_remainders_from_tile_to_tile():
    """A budget of half a step per supergroup is used by every second tile of one."""
    assert capacities([1] * 4, (2, 4), 82 + 32) == [82, 146, 82, 146]


@st.composite
def tiles(draw, widths=subsets, most=40):
    """Draw (energies, capacity, widths) of one tile."""
    exponents = draw(st.lists(st.floats(-120, 120), max_size=most))
    ties = draw(st.booleans())
    energies = sorted((2.0 ** (round(e) if ties else e) for e in exponents), reverse=True)
    widths = draw(widths)
    zeros = draw(st.integers(0, 5))
    least, largest = BYTES[widths[0]], BYTES[widths[-1]]
    room = draw(st.integers(0, (largest - least) * len(energies) + 100))
    return energies + [0.0] * zeros, least * (len(energies) + zeros) + room, widths


@given(tiles())
def test_cuts(tile):
    """A tile's widths never ascend, fit into its bytes, and leave less than a step unused."""
    energies, capacity, widths = tile
    nonzero = sum(e > 0 for e in energies)

    cuts = cut(energies, capacity, widths)

    assert cuts[0] == nonzero, "no bits for zeros, some for everything else"
    assert all(a >= b >= 0 for a, b in pairwise([*cuts, 0]))
    used = sum(BYTES[w] for w in widths_of(cuts, widths, len(energies)))
    assert used <= capacity
    dearest = max((BYTES[b] - BYTES[a] for a, b in pairwise(widths)), default=0)
    assert cuts[-1] == nonzero or capacity - used < dearest


@given(tiles())
def test_zeros_free_their_bytes(tile):
    """The same capacity without the zero supergroups gives the same widths."""
    energies, capacity, widths = tile
    without = [e for e in energies if e > 0]
    assert cut(energies, capacity, widths) == cut(without, capacity, widths)


@given(tiles(), st.integers(-20, 20))
def test_only_ratios_of_energies_count(tile, exponent):
    energies, capacity, widths = tile
    scaled = [e * 2.0**exponent for e in energies]
    assert cut(scaled, capacity, widths) == cut(energies, capacity, widths)


@given(st.lists(tiles(st.just((2, 4, 8))), min_size=1, max_size=4))
def test_tiles_are_cut_independently(tiles):
    size = max(len(energies) for energies, *_ in tiles)
    rows = [energies + [0.0] * (size - len(energies)) for energies, *_ in tiles]
    together = threshold_cuts(
        torch.tensor(rows, dtype=torch.float64).view(len(rows), size),
        torch.tensor([capacity for _, capacity, _ in tiles]),
        (2, 4, 8),
    )
    assert together.tolist() == [cut(*tile) for tile in tiles]


@pytest.mark.parametrize("widths", [(1, 2, 4, 8, 16), (2, 4, 8), (4, 8, 16), (1, 2)], ids=str)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_threshold_ratios_are_the_papers(widths, share):
    """T₁,₂ = (5/32) T₂,₄, T₂,₄ = (17/512) T₄,₈, T₄,₈ = (257/2¹⁷) T₈,₁₆ (DynamiQ §3.2)."""
    step = 1.002
    energies = [step**-i for i in range(12_000)]
    least, largest = BYTES[widths[0]], BYTES[widths[-1]]
    cuts = cut(energies, int((least + share * (largest - least)) * len(energies)), widths)

    ratios = {1: 5 / 32, 2: 17 / 512, 4: 257 / 2**17}
    for (narrow, lower), (_, upper) in pairwise(zip(widths[:-1], cuts[1:], strict=True)):
        if upper > 0 and lower < len(energies):
            ratio = step ** (upper - lower)
            assert ratio == pytest.approx(ratios[narrow], rel=2.5 * (step - 1))


def test_ties_go_to_the_narrower_width_first():
    for steps in range(11):
        assert cut([1.0] * 10, 82 * 10 + 64 * steps + 10, (2, 4, 8)) == [10, steps, 0]
    assert cut([1.0] * 10, 146 * 10 + 128 * 3, (2, 4, 8)) == [10, 10, 3]


def test_what_is_left_buys_a_cheaper_step():
    """The next step in order costs 128 bytes; 64 are left and widen the last supergroup."""
    energies = [1.0, 1e-9]
    assert cut(energies, 82 * 2 + 64 + 64, (2, 4, 8)) == [2, 2, 0]


def modelled_error(energies, assigned):
    return sum(e * 4.0**-w for e, w in zip(energies, assigned, strict=True))


def best(energies, capacity, widths):
    """Try every choice of widths."""
    return min(
        modelled_error(energies, choice)
        for choice in product(widths, repeat=len(energies))
        if sum(BYTES[w] for w in choice) <= capacity
    )


def room_for_improvement(energies, capacity, widths):
    """Return what the bytes left by the affordable steps could be worth (the relaxed optimum)."""
    steps = sorted(
        (e * (4.0**-a - 4.0**-c) / (BYTES[c] - BYTES[a]), BYTES[c] - BYTES[a])
        for e in energies
        for a, c in pairwise(widths)
    )[::-1]
    room = capacity - BYTES[widths[0]] * len(energies)
    for gain_per_byte, cost in steps:
        if cost > room:
            return gain_per_byte * room
        room -= cost
    return 0.0


@settings(max_examples=150)
@given(
    st.lists(st.floats(-12, 12), min_size=1, max_size=6),
    st.sampled_from([(2, 4, 8), (2, 4), (4, 8), (1, 2, 4, 8)]),
    st.floats(0, 1),
)
def test_no_choice_of_widths_is_better_by_more_than_a_part_of_one_step(exponents, widths, share):
    """An exhaustive search gains at most what the left-over bytes are worth."""
    if len(widths) == 4:
        exponents = exponents[:5]
    energies = sorted((2.0**e for e in exponents), reverse=True)
    least, largest = BYTES[widths[0]], BYTES[widths[-1]]
    capacity = int(len(energies) * (least + share * (largest - least)))

    ours = modelled_error(
        energies, widths_of(cut(energies, capacity, widths), widths, len(energies))
    )

    optimum = best(energies, capacity, widths)
    assert optimum * (1 - 1e-12) <= ours
    assert ours <= optimum + room_for_improvement(energies, capacity, widths) + 1e-12 * ours


def test_no_tiles():
    none = threshold_cuts(torch.zeros(0, 0, dtype=torch.float64), torch.zeros(0).long(), (2, 4, 8))
    assert none.shape == (0, 3)
    assert list(chain(capacities([], (2, 4, 8), 100.0))) == []
