"""How much weight a wider code needs: the limit without compounding, and an exhaustive search."""

from itertools import product

import pytest
import torch

from dynamiq import Butterfly, Ring
from dynamiq.compressors.dynamiq.hops import HopModel
from dynamiq.compressors.dynamiq.worth import Widths, joint_worth, separable_worth

ROTATED = Widths(
    tuple(32 * w + 2 for w in range(1, 11)),
    (1.80, 0.247, 0.0464, 0.0102, 2.38e-3, 5.76e-4, 1.42e-4, 3.51e-5, 8.75e-6, 2.19e-6),
)
LOCAL = Widths(
    tuple(32 * w + 18 for w in range(1, 11)),
    (1.0, 0.170, 0.0321, 7.0e-3, 1.64e-3, 3.97e-4, 9.8e-5, 2.42e-5, 6.03e-6, 1.51e-6),
)
PEAKS = {"rotated": (ROTATED, 1.9), "local": (LOCAL, 1.3)}

MODELS = {
    f"{t.kind}-{n}{'' if gather else '-scatter'}": HopModel.of(t.schedule(n), gather)
    for t, n, gather in [
        (Ring(), 2, True),
        (Ring(), 3, True),
        (Ring(), 4, False),
        (Butterfly(), 3, True),
        (Butterfly(), 4, True),
        (Butterfly(), 5, True),
        (Butterfly(), 8, False),
    ]
}
"""With two or three classes that are sent."""

every_model = pytest.mark.parametrize("name", MODELS)


def from_two_bits(widths):
    return Widths(widths.bytes[1:], widths.errors[1:])


def chosen(worth, ratio):
    """Return int64[sent], the index of the width that each class has at a ratio."""
    return (worth <= ratio).sum(1) - 1


def every_choice(model, widths, correlation, pi, ratio):
    """Return all choices int64[m, sent], their noise and their bytes, at a price of 1."""
    choices = torch.tensor(list(product(range(len(widths.bytes)), repeat=model.sent)))
    errors = torch.tensor(widths.errors, dtype=torch.float64)[choices].T
    rows = torch.full((len(choices),), 1.0, dtype=torch.float64)
    energies = model.energies(rows * ratio, rows * correlation)
    noise, peaked = (part[-1] for part in model.arriving(energies, errors, rows * pi))
    if model.gather:
        noise = noise + errors[-1] * (energies[-1] + peaked)
    transfers = torch.tensor([c.transfers for c in model.classes[: model.sent]])
    return choices, noise, (torch.tensor(widths.bytes)[choices] * transfers).sum(1)


def compared(model, widths, correlation, pi):
    """Yield, for ratios over the whole range, our noise and bytes, and those of every choice."""
    worth = joint_worth(model, widths, correlation, pi)
    for quarter in range(-40, 101, 3):
        ratio = 2.0 ** (quarter / 4)
        choices, noise, cost = every_choice(model, widths, correlation, pi, ratio)
        (ours,) = (choices == chosen(worth, ratio)).all(1).nonzero()[0].tolist()
        yield ours, noise, cost


@every_model
@pytest.mark.parametrize("recipe", PEAKS)
@pytest.mark.parametrize("correlation", [0.0, 0.125, 1.0])
def test_no_widths_of_a_row_have_a_lower_total(name, recipe, correlation):
    """Noise plus the price of the bytes, at many prices; an exhaustive search gains 3 % at most."""
    widths, pi = PEAKS[recipe]
    for ours, noise, cost in compared(MODELS[name], from_two_bits(widths), correlation, pi):
        total = noise + cost
        assert total[ours] <= 1.03 * total.min()


@every_model
@pytest.mark.parametrize("recipe", PEAKS)
def test_with_one_bit_no_widths_have_less_noise_for_no_more_bytes(name, recipe):
    """At the edge of one bit, which compounds, the iteration may end a fifth above the least total.

    Where it ends is still the best for its bytes.
    """
    widths, pi = PEAKS[recipe]
    for ours, noise, cost in compared(MODELS[name], widths, 0.125, pi):
        assert noise[ours] <= 1.001 * noise[cost <= cost[ours]].min()
        assert noise[ours] + cost[ours] <= 1.2 * (noise + cost).min()


@every_model
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_errors_too_small_to_compound_are_separable(name, correlation):
    """The worth alone, per energy of the partial sum, message and transfer; to an eighth octave."""
    model = MODELS[name]
    tiny = Widths(LOCAL.bytes[3:], tuple(e * 1e-6 for e in LOCAL.errors[3:]))
    joint = joint_worth(model, tiny, correlation, 1.0)
    alone = torch.tensor(separable_worth(tiny), dtype=torch.float64)[1:]
    n = model.world_size
    for h, c in enumerate(model.classes[: model.sent]):
        growth = (c.summed + c.summed * (c.summed - 1) * correlation) / n
        ratio = joint[h, 1:] / (alone * c.transfers / (c.messages * growth))
        assert (ratio >= 1 - 1e-4).all()
        assert (ratio <= 2.0 ** (1 / 8) * (1 + 1e-4)).all()


@pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)
@pytest.mark.parametrize("recipe", PEAKS)
def test_a_step_is_worth_no_less_than_the_one_before(topology, recipe):
    widths, pi = PEAKS[recipe]
    worth = joint_worth(HopModel.of(topology.schedule(12), True), widths, 0.125, pi)
    assert (worth[:, 0] == 0).all(), "the narrowest width is free"
    assert (worth.diff(dim=1) >= 0).all()
    assert worth.isfinite().all()


def test_later_hops_of_a_ring_get_more_and_the_gather_message_less():
    """From 4 bits up, where noise hardly compounds: in the order of the partial sums' energy."""
    worth = joint_worth(HopModel.of(Ring().schedule(8), True), ROTATED, 0.125, 1.9)[:, 3:]
    assert (worth[:-1].diff(dim=0) <= 0).all()
    assert (worth[-1] > worth[-2]).all()


def test_noise_that_is_carried_on_makes_wide_codes_worth_more():
    """π above 1 raises what a bit at an early hop saves, and ρ what one at a late hop does."""
    model = HopModel.of(Ring().schedule(8), True)
    plain = joint_worth(model, ROTATED, 0.125, 1.0)
    assert (joint_worth(model, ROTATED, 0.125, 3.0)[:, 1:] <= plain[:, 1:]).float().mean() > 0.9
    assert (joint_worth(model, ROTATED, 0.5, 1.0)[1:, 3:] < plain[1:, 3:]).all()


@pytest.mark.parametrize("worth_of", ["separable", "joint"])
def test_widths_off_the_hull(worth_of):
    """A width above the line of its neighbours is skipped, a wider one that is worse never taken.

    The first errs by 1, the second by 0.9 for half of the bytes that bring the third's 0.1.
    """
    widths = Widths((50, 82, 114, 146), (1.0, 0.9, 0.1, 0.2))
    if worth_of == "joint":
        small = Widths(widths.bytes, tuple(e * 1e-4 for e in widths.errors))
        worth = joint_worth(HopModel.of(Ring().schedule(3), True), small, 0.0, 1.0)
    else:
        worth = torch.tensor([separable_worth(widths)], dtype=torch.float64)
        assert worth[0, 1].item() == pytest.approx(64 / 0.9)
    assert torch.equal(worth[:, 1], worth[:, 2])
    assert (worth[:, 1] > 0).all()
    assert worth[:, 3].isinf().all()
