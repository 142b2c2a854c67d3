"""Bytes and bits: never above the room, thresholds as in DynamiQ §3.2, near the optimum."""

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq.compressors.dynamiq.geometry import Capacities
from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.compressors.dynamiq.worth import Widths, separable_worth
from dynamiq.core.layout import Layout
from dynamiq.kernels.allocation.ops import fill
from dynamiq.kernels.allocation.steps import Steps
from tests.contracts.compressor import uneven_bounds

CPU = torch.device("cpu")
BAND = 1.02
"""Steps that pay at prices less than 2 % apart may be taken in any order."""

RECIPES = {
    # Rotated and dithered.
    "fine": Widths(
        tuple(32 * w + 2 for w in range(1, 11)),
        (1.8, 0.247, 0.0464, 0.0102, 2.38e-3, 5.76e-4, 1.42e-4, 3.51e-5, 8.75e-6, 2.19e-6),
    ),
    "paper": Widths((82, 146, 274), tuple(4.0**-w for w in (2, 4, 8))),
    "with 16 bits": Widths((50, 146, 512), (0.3, 0.01, 5e-6)),
    "one": Widths((66,), (0.1,)),
    # The second width is above the line from the first to the third.
    "above the hull": Widths((50, 82, 114, 146), (1.0, 0.9, 0.1, 0.05)),
    # A wider code that is worse is never worth its bytes.
    "no better": Widths((50, 82, 114), (1.0, 0.1, 0.2)),
}


def steps_of(worth, nbytes, transfers=(1,)):
    """Return steps; worth by class and width, or for all rows and classes alike."""
    worth = torch.tensor(worth, dtype=torch.float64)
    if worth.dim() == 1:
        worth = worth.expand(len(transfers), -1).contiguous()
    costs = [nbytes[0], *(b - a for a, b in pairwise(nbytes))]
    return Steps(worth[:, :, None], torch.tensor(costs), torch.tensor(transfers))


def alone(widths):
    """Return the steps of one class whose errors do not depend on each other."""
    return steps_of(separable_worth(widths), widths.bytes)


def cuts_of(energies, room, widths):
    """Return how many supergroups of one list take each step."""
    rows = torch.tensor([energies], dtype=torch.float64)
    return fill(rows, torch.tensor([[room]]), alone(widths), shared=False)[0, 0].tolist()


def used(taken, steps, shared=False):
    """Return the bytes of each class, or what all classes send."""
    each = (taken * steps.bytes).sum(2)
    return (each * steps.transfers).sum(1) if shared else each


@st.composite
def spectra(draw, least_rows=0, most_rows=40):
    """Draw descending energies over many orders of magnitude, with ties, zeros last."""
    exponents = draw(st.lists(st.floats(-120, 120), min_size=least_rows, max_size=most_rows))
    ties = draw(st.booleans())
    energies = sorted((2.0 ** (round(e) if ties else e) for e in exponents), reverse=True)
    return energies + [0.0] * draw(st.integers(0, 5))


@st.composite
def joint_steps(draw):
    """Draw the steps of one to four classes: worth that increases from step to step."""
    nbytes = RECIPES[draw(st.sampled_from(sorted(RECIPES)))].bytes
    transfers = draw(st.lists(st.integers(1, 15), min_size=1, max_size=4))
    factors = st.lists(st.floats(1.0, 40.0), min_size=len(nbytes), max_size=len(nbytes))
    worth = []
    for _ in transfers:
        row = [draw(st.floats(1e-3, 1e3))]
        for factor in draw(factors):
            row.append(row[-1] * factor)
        worth.append([0.0, *row[1 : len(nbytes)]])
    return steps_of(worth, nbytes, transfers)


@st.composite
def problems(draw, shared):
    """Draw (weights, room, steps): one list of rows, and room for more than the least."""
    energies, steps = draw(spectra()), draw(joint_steps())
    rows = len(energies)
    weights = torch.tensor([energies], dtype=torch.float64).view(1, rows)
    live = sum(e > 0 for e in energies)
    share = draw(st.floats(0, 1.1))
    each = [int(live * (steps.bytes[0] + share * steps.bytes[1:].sum()))] * len(steps.transfers)
    if shared:
        room = [sum(b * t for b, t in zip(each, steps.transfers.tolist(), strict=True))]
    else:
        room = [b + draw(st.integers(0, 300)) for b in each]
    return weights, torch.tensor([room]), steps


@pytest.mark.parametrize("shared", [True, False], ids=["shared room", "own rooms"])
@given(data=st.data())
def test_the_room_is_used_and_never_exceeded(data, shared):
    """Cuts never ascend, zeros get nothing; what is left would not pay for another step."""
    weights, room, steps = data.draw(problems(shared))
    live = int((weights > 0).sum())

    taken = fill(weights, room, steps, shared=shared)

    assert taken.shape == (1, len(steps.transfers), len(steps.bytes))
    assert (taken[..., 0] == live).all(), "no bits for zeros, some for everything else"
    assert (taken >= 0).all()
    assert (taken.diff(dim=2) <= 0).all()
    times = steps.transfers if shared else torch.ones_like(steps.transfers)
    left = room[0] - (used(taken, steps, shared) if shared else used(taken, steps)[0])
    assert (left >= 0).all()
    if len(steps.bytes) == 1:
        return
    dearest = steps.bytes[1:].max() * (times.max() if shared else 1)
    is_full = (taken[0, :, -1] == live).all() if shared else taken[0, :, -1] == live
    assert ((left < dearest) | is_full).all()


@given(problems(shared=True), st.integers(-60, 60))
def test_only_ratios_of_weights_count(problem, exponent):
    weights, room, steps = problem
    # A power of two moves the grid of prices that are tried, and with it ties of up to 2 %.
    taken, scaled = (fill(w, room, steps, shared=True) for w in (weights, weights * 2.0**exponent))
    prices = _prices(weights, steps)
    for a, b in ((taken, scaled), (scaled, taken)):
        extra = prices[_is_taken(a, prices) & ~_is_taken(b, prices)]
        others = prices[_is_taken(b, prices) & ~_is_taken(a, prices)]
        if extra.numel() and others.numel():
            assert extra.max() <= others.min() * BAND


def _prices(weights, steps):
    """Return float64[h, s, r], the price up to which each row takes each step."""
    return (weights[0] / steps.worth).expand(-1, -1, weights.shape[1])


def _is_taken(taken, prices):
    """Return bool[h, s, r]."""
    return torch.arange(prices.shape[2]) < taken[0][..., None]


@given(st.lists(spectra(), min_size=1, max_size=4), joint_steps(), st.floats(0, 1))
def test_lists_are_filled_independently(lists, steps, share):
    size = max(len(energies) for energies in lists)
    rows = [energies + [0.0] * (size - len(energies)) for energies in lists]
    weights = torch.tensor(rows, dtype=torch.float64).view(len(rows), size)
    live = (weights > 0).sum(1)
    top = steps.bytes[0] + share * steps.bytes[1:].sum()
    room = (live * top * steps.transfers.sum()).long()[:, None]
    together = fill(weights, room, steps, shared=True)
    for i in range(len(rows)):
        alone = fill(weights[i : i + 1], room[i : i + 1], steps, shared=True)
        assert torch.equal(together[i], alone[0])


@given(spectra(), st.sampled_from(sorted(RECIPES)), st.floats(0, 1))
def test_zeros_free_their_bytes(energies, name, share):
    """The same room without the zero supergroups gives the same widths."""
    widths = RECIPES[name]
    least, largest = widths.bytes[0], widths.bytes[-1]
    room = int(len(energies) * (least + share * (largest - least)))
    without = [e for e in energies if e > 0]
    assert cuts_of(energies, room, widths) == cuts_of(without, room, widths)


@given(
    rows=st.integers(1, 30),
    offsets=st.lists(st.integers(0, 40), min_size=2, max_size=4),
    transfers=st.lists(st.integers(1, 9), min_size=4, max_size=4),
    share=st.floats(0, 1),
)
def test_what_a_class_gets_of_a_shared_room_is_enough_for_the_same_cuts(
    rows, offsets, transfers, share
):
    """So that a call within hop totals makes of the same spectrum what the totals were made for."""
    # Prices of steps of one class are never alike: they differ in their eighths of an octave.
    worth = [[0.0, *(2.0 ** (o / 8 + 3.25 * s) for s in range(1, 4))] for o in offsets]
    steps = steps_of(worth, (34, 66, 98, 226), transfers[: len(offsets)])
    weights = (2.0 ** -torch.arange(rows, dtype=torch.float64))[None]
    room = int(rows * (34 + share * 192) * int(steps.transfers.sum()))

    together = fill(weights, torch.tensor([[room]]), steps, shared=True)

    apart = fill(weights, used(together, steps), steps, shared=False)
    assert torch.equal(apart, together)


def test_transfers_make_a_class_dear():
    """Two classes of equal worth, one of whose bytes count seven times."""
    steps = steps_of([[0.0, 1.0], [0.0, 7.0]], (34, 66), (1, 7))
    weights = (1.5 ** -torch.arange(40.0).double())[None]
    room = torch.tensor([[40 * 34 * 8 + 32 * 120]])
    cheap, dear = fill(weights, room, steps, shared=True)[0, :, 1].tolist()
    # ln 7 / ln 1.5 = 4.8 rows apart, and all bytes spent.
    assert cheap - dear in {4, 5}
    assert 120 - 7 < cheap + 7 * dear <= 120


WIDTH_SETS = [(1, 2, 4, 8, 16), (2, 4, 8), (4, 8, 16), (1, 2)]


@pytest.mark.parametrize("widths", WIDTH_SETS, ids=str)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_threshold_ratios_are_the_papers(widths, share):
    """T₁,₂ = (5/32) T₂,₄, T₂,₄ = (17/512) T₄,₈, T₄,₈ = (257/2¹⁷) T₈,₁₆ (DynamiQ §3.2).

    The paper charges codes only.
    """
    step = 1.002
    energies = [step**-i for i in range(12_000)]
    sizes = Widths(tuple(32 * w for w in widths), tuple(4.0**-w for w in widths))
    least, largest = sizes.bytes[0], sizes.bytes[-1]
    cuts = cuts_of(energies, int((least + share * (largest - least)) * len(energies)), sizes)

    ratios = {1: 5 / 32, 2: 17 / 512, 4: 257 / 2**17}
    for (narrow, lower), (_, upper) in pairwise(zip(widths[:-1], cuts[1:], strict=True)):
        if upper > 0 and lower < len(energies):
            assert step ** (upper - lower) == pytest.approx(ratios[narrow], rel=BAND - 1)


def test_ties_go_to_the_narrower_width_first():
    for bought in range(11):
        cuts = cuts_of([1.0] * 10, 82 * 10 + 64 * bought + 10, RECIPES["paper"])
        assert cuts == [10, bought, 0]
    assert cuts_of([1.0] * 10, 146 * 10 + 128 * 3, RECIPES["paper"]) == [10, 10, 3]


def test_a_code_that_is_worse_is_never_taken():
    """Not even with bytes that nothing else can use."""
    assert cuts_of([8.0, 4.0, 1.0], 10_000, RECIPES["no better"]) == [3, 3, 0]
    dear = Widths((50, 82, 274), (1.0, 0.1, 0.2))
    assert cuts_of([8.0, 4.0, 1.0], 10_000, dear) == [3, 3, 0]


def error_of(energies, sizes, widths):
    """Return the modelled error of supergroups with so many bytes."""
    by_size = dict(zip(widths.bytes, widths.errors, strict=True))
    return sum(e * by_size[size] for e, size in zip(energies, sizes, strict=True))


def best_error(energies, room, widths):
    """Try every choice of widths."""
    return min(
        error_of(energies, choice, widths)
        for choice in product(widths.bytes, repeat=len(energies))
        if sum(choice) <= room
    )


def worth_of_one_supergroup(energies, sizes, widths):
    """Return the most that one supergroup's next step, to a code that pays, saves."""
    gains = [0.0]
    for energy, size in zip(energies, sizes, strict=True):
        now = error_of([energy], [size], widths)
        wider = [b for b in widths.bytes if b > size]
        rates = [(now - error_of([energy], [b], widths)) / (b - size) for b in wider]
        if rates and max(rates) > 0:
            gains.append(now - error_of([energy], [wider[rates.index(max(rates))]], widths))
    return max(gains)


@pytest.mark.parametrize("name", sorted(RECIPES))
@settings(max_examples=80)
@given(data=st.data())
def test_no_choice_of_widths_is_better_by_more_than_one_supergroups_worth(name, data):
    """An exhaustive search gains less than the next step of one supergroup does."""
    widths = RECIPES[name]
    most = 6 if len(widths.bytes) < 5 else 4
    exponents = data.draw(st.lists(st.floats(-12, 12), min_size=1, max_size=most))
    if name == "above the hull":
        # Steps within a band are bought width by width, not row by row: no ties here.
        exponents = [e / 13 + i for i, e in enumerate(exponents)]
    share = data.draw(st.floats(0, 1))
    energies = sorted((2.0**e for e in exponents), reverse=True)
    least, largest = widths.bytes[0], widths.bytes[-1]
    room = int(len(energies) * (least + share * (largest - least)))

    cuts = cuts_of(energies, room, widths)

    sizes = [widths.bytes[sum(p < cut for cut in cuts) - 1] for p in range(len(energies))]
    ours = error_of(energies, sizes, widths)
    optimum = best_error(energies, room, widths)
    assert optimum * (1 - 1e-12) <= ours
    assert ours <= optimum + BAND * worth_of_one_supergroup(energies, sizes, widths)


def test_separable_worth_is_bytes_per_saved_error():
    """Of the step itself on the convex hull, or else of the step past it."""
    assert separable_worth(RECIPES["paper"])[1:] == pytest.approx(
        [64 / (4.0**-2 - 4.0**-4), 128 / (4.0**-4 - 4.0**-8)], rel=1e-12
    )
    above = separable_worth(RECIPES["above the hull"])
    assert above == pytest.approx([0.0, 64 / 0.9, 64 / 0.9, 32 / 0.05], rel=1e-12)
    assert separable_worth(RECIPES["no better"]) == pytest.approx([0.0, 32 / 0.9, torch.inf])


@pytest.mark.parametrize("shared", [True, False])
def test_nothing_to_fill(shared):
    steps = steps_of([0.0, 1.0, 2.0], (34, 66, 98), (1, 1))
    room = torch.zeros(0, 1 if shared else 2, dtype=torch.int64)
    none = fill(torch.zeros(0, 0, dtype=torch.float64), room, steps, shared=shared)
    assert none.shape == (0, 2, 3)
    room = torch.zeros(1, 1 if shared else 2, dtype=torch.int64)
    assert not fill(torch.zeros(1, 3, dtype=torch.float64), room, steps, shared=shared).any()


@st.composite
def deals(draw):
    """Draw the tiles of a bucket: few supergroups, or more than one tile to a chunk."""
    world_size = draw(st.integers(1, 9))
    most = draw(st.sampled_from([3000, 80_000, 256 * 1300 * world_size]))
    numel = draw(st.integers(1, most))
    bounds = uneven_bounds(numel, world_size) if draw(st.booleans()) else None
    return Deal.of(Layout(numel, world_size, 256, bounds))


SIZES = [RECIPES[name].bytes for name in ("fine", "paper", "with 16 bits", "one")]


@given(deals(), st.sampled_from(SIZES), st.floats(0, 500))
def test_capacities(deal, sizes, extra):
    """Within the budget after each list, less than a step or an alignment per tile below it."""
    budget = sizes[0] + extra
    counts = deal.counts()
    capacities = Capacities.of(deal, sizes, budget, CPU)
    per_deal = len(counts) // deal.deals
    least_loss = math.gcd(*(size - sizes[0] for size in sizes)) or 1

    seen = used = 0
    for i, full in enumerate(capacities.mean):
        first, last = i * per_deal, (i + 1) * per_deal
        seen += sum(counts[first:last])
        used += capacities.nbytes(full, first, last)
        best = seen * min(budget, sizes[-1])
        assert best - max(16, least_loss) * per_deal <= used <= best * (1 + 1e-12)
        assert capacities.rows[i] == max(counts[first:last])
        assert full < capacities.rows[i] * sizes[-1] + least_loss
        for tile in range(first, last):
            assert capacities.nbytes(full, tile, tile + 1) >= counts[tile] * sizes[0]


@given(deals(), st.sampled_from(SIZES), st.floats(0, 500), st.integers(0, 200))
def test_offsets_are_where_the_bytes_before_end(deal, sizes, extra, more):
    capacities = Capacities.of(deal, sizes, sizes[0] + extra, CPU)
    tiles = len(deal.counts())
    full = capacities.mean[0] + 2 * more
    for first, last in ((0, tiles), (tiles // 2, tiles), (tiles // 3, tiles // 3)):
        offsets = capacities.offsets(full, first, last)
        ends = [capacities.nbytes(full, first, tile) for tile in range(first, last + 1)]
        assert (offsets - offsets[0]).tolist() == ends
        assert not (offsets % 2).any(), "BF16 scales are at even addresses"


@pytest.mark.parametrize("numel", [256 * 90 * 9, 256 * 90 * 9 - 256 * 4, 256 * 520 * 9])
def test_large_tiles_are_aligned(numel):
    deal = Deal.of(Layout(numel, 9, 256))
    capacities = Capacities.of(deal, RECIPES["paper"].bytes, 156.3, CPU)
    (full,) = capacities.mean
    assert not (capacities.offsets(full, 0, len(deal.counts())) % 16).any()
    assert full == pytest.approx(156.3 * capacities.rows[0], abs=96)


def test_a_tile_with_a_supergroup_less_has_less():
    """401 supergroups on four ranks: the first chunk has one more than the others."""
    deal = Deal.of(Layout(401 * 256, 4, 256))
    capacities = Capacities.of(deal, (34, 66, 98), 50.0, CPU)
    (full,) = capacities.mean
    sizes = [capacities.nbytes(full, tile, tile + 1) for tile in range(4)]
    assert sizes == [full, full - 34, full - 34, full - 34]
    assert sum(sizes) == pytest.approx(401 * 50, abs=4 * 32)
    assert sum(sizes) <= 401 * 50


def test_bounds_give_every_slice_its_own_budget():
    """What a slice cannot spend on a step goes to the next one."""
    deal = Deal.of(Layout(256 * 40, 3, 256, (0, 0, 256 * 30, 256 * 40)))
    capacities = Capacities.of(deal, (34, 66, 98, 322), 51.6, CPU)
    assert capacities.rows == (0, 30, 10)
    # 30 · 17.6 = 528 bytes above the least are 16 steps and 16 bytes; 16 + 176 are 6 steps.
    assert capacities.mean == (0, 30 * 34 + 16 * 32, 10 * 34 + 6 * 32)
