"""The deal: every supergroup once, bounds never crossed, hands equal to within one."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.compressors.dynamiq.order import Deal
from dynamiq.core.layout import Layout
from dynamiq.kernels.supergroups.wire import SUPERGROUP, TILE


def energies_of(layout, draw_value):
    """Return one energy per supergroup of the padded bucket, -1 for padding."""
    real = (layout.true_entries() > 0).tolist()
    return torch.tensor([draw_value() if r else -1.0 for r in real], dtype=torch.float64)


@st.composite
def deals(draw):
    """Draw (layout, energies) with many ties, with and without bounds."""
    n = draw(st.integers(1, 9))
    if draw(st.booleans()):
        layout = Layout(draw(st.integers(0, 20_000)), n, SUPERGROUP)
    else:
        sizes = draw(st.lists(st.integers(0, 3000), min_size=n, max_size=n))
        bounds = tuple(sum(sizes[:i]) for i in range(n + 1))
        layout = Layout(bounds[-1], n, SUPERGROUP, bounds)
    values = st.sampled_from([0.0, 1.0, 2.0**-133, 3.5, 2.0**120])
    return layout, energies_of(layout, lambda: draw(values))


def check(layout, energies):
    n, p = layout.world_size, layout.positions
    deal = Deal.of(layout)
    units = deal.units(energies)

    assert units.shape == (n, deal.tiles, deal.size)
    assert deal.size <= TILE
    held = units[units >= 0]
    assert sorted(held.tolist()) == (energies >= 0).nonzero()[:, 0].tolist(), "each exactly once"
    assert (units >= 0).sum(2).flatten().tolist() == deal.counts()
    hands = []
    for chunk in range(n):
        for tile in units[chunk]:
            real = tile[tile >= 0].tolist()
            assert tile[: len(real)].tolist() == real, "no gaps"
            keys = [(-energies[u].item(), u) for u in real]
            assert keys == sorted(keys), "descending, ties by index"
            if layout.bounds is not None:
                assert all(u // p == chunk for u in real), "a bound was crossed"
        hands.append(
            sorted((-energies[u].item(), u) for u in units[chunk].flatten().tolist() if u >= 0)
        )
        counts = (units[chunk] >= 0).sum(1)
        assert counts.numel() == 0 or counts.max() - counts.min() <= 1
    if layout.bounds is None:
        whole = sorted(chain(*hands))
        assert [whole[c::n] for c in range(n)] == hands, "dealt like cards"


@given(deals())
def test_deal(case):
    check(*case)


@pytest.mark.parametrize("bounds", [None, (0, 0, 700 * SUPERGROUP + 3, 1100 * SUPERGROUP)])
@pytest.mark.parametrize("world_size", [3])
def test_deal_of_several_tiles(world_size, bounds):
    numel = 1100 * SUPERGROUP if bounds else 3000 * SUPERGROUP - 1
    layout = Layout(numel, world_size, SUPERGROUP, bounds)
    generator = torch.Generator().manual_seed(0)
    check(layout, energies_of(layout, lambda: torch.randint(50, (), generator=generator).item()))
    assert Deal.of(layout).tiles == 2


@pytest.mark.parametrize("positions", [1, 511, 512, 513, 1024, 1025, 5000])
def test_tiles_are_few_and_of_equal_size(positions):
    deal = Deal.of(Layout(positions * SUPERGROUP * 2, 2, SUPERGROUP))
    assert deal.tiles == -(-positions // TILE)
    assert max(deal.counts()) - min(deal.counts()) <= 1
    assert sum(deal.counts()) == 2 * positions


def test_the_shape_does_not_depend_on_the_energies():
    layout = Layout(10_000, 4, SUPERGROUP)
    deal = Deal.of(layout)
    shapes = {
        tuple((deal.units(energies_of(layout, value)) >= 0).sum(2).flatten().tolist())
        for value in (lambda: 0.0, lambda: 1.0, iter(range(1000)).__next__)
    }
    assert shapes == {tuple(deal.counts())}
