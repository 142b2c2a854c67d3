"""Codes, scales and rounding: against an independent quantiser in float64, and in the mean."""

from itertools import permutations

import numpy as np
import pytest
import torch

from dynamiq.core import randomness
from dynamiq.core.randomness import Stream
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.wire import Address
from tests.kernels.supergroups import operations, oracle
from tests.kernels.supergroups.oracle import ADDRESS, WIDTHS

every_width = pytest.mark.parametrize("width", WIDTHS)
every_scaled_width = pytest.mark.parametrize("width", WIDTHS[:-1])
every_levelled_width = pytest.mark.parametrize("width", WIDTHS[1:-1])
both_group_scales = pytest.mark.parametrize("group_scales", ["stochastic", "up"])


def address(seed=1, call=2, hop=0, sender=1, world_size=4):
    return Address(seed, call, hop, sender, world_size)


def encode(x, width, rounding="stochastic", group_scales="stochastic", address=ADDRESS):
    """Return the payload of x: float32[s, 256], all supergroups of one width, and its tiles."""
    options = {"group_scales": group_scales, "address": address}
    tiles = oracle.tiles([[width] * len(x)], (width,), **options)
    quantizer = oracle.quantizer((width,), rounding, group_scales)
    out = torch.empty(tiles.nbytes, dtype=torch.uint8)
    ops.compress(operations.values_of(x[None]), tiles, quantizer, out)
    return out, tiles, quantizer


def quantized(x, width, **options):
    """Return x: float32[s, 256] as it arrives."""
    return operations.decompressed(*encode(x, width, **options))[0]


def random_rows(count, seed=0, spread=1.0):
    """Return float32[count, 256] with groups of different scales and some exact zeros."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 16, 16)) * np.exp(
        spread * generator.normal(size=(count, 16, 1))
    )
    x[generator.random(x.shape) < 0.02] = 0.0
    return torch.from_numpy(x.reshape(count, 256).astype(np.float32))


def private_uniform(stream, count, lanes):
    key = randomness.key(ADDRESS.seed, ADDRESS.call, stream, ADDRESS.hop, ADDRESS.sender)
    return randomness.uniform(randomness.words(key, torch.arange(count), lanes)).double().numpy()


def same_but_for_ties(actual, expected, distance, tolerance):
    """Compare integers, but for those whose decision is closer than FP32 can tell."""
    close = distance < tolerance
    assert close.mean() < 0.02
    assert (actual == expected)[~close].all()
    assert (np.abs(actual - expected) <= 1).all()


@every_scaled_width
@both_group_scales
@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_every_code_is_the_oracles(width, group_scales, rounding):
    count = 60
    x = random_rows(count)
    payload, *_ = encode(x, width, rounding, group_scales)
    coded, rest = oracle.read_tile(payload, [width] * count)
    assert rest == b""
    x = x.double().numpy()
    group_max = np.abs(x).reshape(count, 16, 16).max(2)

    scale = np.array([c.scale for c in coded])
    assert scale.tolist() == [oracle.bfloat16_at_least(m) for m in group_max.max(1)]

    ratio = 255 * group_max / scale[:, None]
    group_codes = np.array([c.group_codes for c in coded])
    if group_scales == "up":
        expected = np.ceil(ratio).clip(1, 255)
        distance = np.abs(ratio - np.rint(ratio))
        divisor = scale[:, None] * group_codes / 255
    else:
        fraction = ratio - np.floor(ratio)
        u = private_uniform(Stream.GROUP_SCALE, count, 16)
        expected = np.floor(ratio) + (u < fraction)
        distance = np.minimum(np.abs(u - fraction), np.abs(ratio - np.rint(ratio)))
        divisor = group_max
    same_but_for_ties(group_codes, expected, distance, 1e-4)

    a = np.minimum(np.abs(x) / divisor.repeat(16, axis=1), 1.0)
    u = private_uniform(Stream.ENTRY, count, 256) if rounding == "stochastic" else 0.5
    codes = np.array([c.codes for c in coded])
    if width == 1:
        p = (1 + np.sign(x) * a) / 2
        some = x != 0
        same_but_for_ties(codes[some], (u < p)[some], np.abs(u - p)[some], 1e-6)
        return
    levels = oracle.levels(width, oracle.EPSILON.get(width, 0.0))
    low = np.clip(np.searchsorted(levels, a, side="right") - 1, 0, len(levels) - 2)
    fraction = (a - levels[low]) / (levels[low + 1] - levels[low])
    u = np.where(x < 0, 1 - u, u)
    expected = np.sign(x) * (low + (u < fraction)) + len(levels) - 1
    # At a level, FP32 may see the value below or above it.
    distance = np.minimum.reduce([np.abs(u - fraction), fraction, 1 - fraction])
    for exact in (a == 0, a == 1):
        assert (codes[exact] == expected[exact]).all()
    inner = (a > 0) & (a < 1 - 1e-6)
    same_but_for_ties(codes[inner], expected[inner], distance[inner], 2e-4)


@every_width
def test_zeros_stay_zeros(width):
    """All-zero groups and supergroups have no scale, and there is no epsilon anywhere."""
    x = random_rows(6)
    x[0] = 0.0
    x[1, 16:48] = 0.0
    x[2, :240] = 0.0
    for group_scales in ("stochastic", "up"):
        for rounding in ("stochastic", "correlated", "nearest"):
            out = quantized(x, width, rounding=rounding, group_scales=group_scales)
            assert out.isfinite().all()
            zeros = x.view(6, 16, 16) == 0
            empty = zeros.all(2) if width == 1 else zeros
            assert (out.view(6, 16, 16)[empty] == 0).all()
    if width < 16:
        coded, _ = oracle.read_tile(encode(x, width)[0], [width] * 6)
        assert (coded[0].scale, coded[0].group_codes.tolist()) == (0.0, [0] * 16)
        assert coded[1].group_codes[1:3].tolist() == [0, 0]


@every_scaled_width
@both_group_scales
@pytest.mark.parametrize("exponent", [-54, -20, 0, 20, 49])
def test_a_power_of_two_changes_no_code(width, group_scales, exponent):
    """Only scales know how large the values are, over the range that calls can have."""
    x = random_rows(8)
    options = {"rounding": "stochastic", "group_scales": group_scales}
    assert torch.equal(
        quantized(x * 2.0**exponent, width, **options),
        quantized(x, width, **options) * 2.0**exponent,
    )


@every_scaled_width
def test_scales_rounded_up_hold_every_entry(width):
    """So that no entry is clamped, and the largest of a group survives."""
    x = random_rows(200)
    payload, *_ = encode(x, width, group_scales="up")
    coded, _ = oracle.read_tile(payload, [width] * 200)
    group_max = x.abs().double().view(200, 16, 16).amax(2).numpy()
    for c, largest in zip(coded, group_max, strict=True):
        assert (c.scale * c.group_codes / 255 >= largest * (1 - 1e-6)).all()
        assert (c.scale * (c.group_codes - 1) / 255 < largest * (1 + 1e-6)).all()


def test_group_scales_are_unbiased_when_rounded_stochastically():
    x = random_rows(1).expand(4096, 256).contiguous()
    coded, _ = oracle.read_tile(encode(x, 2)[0], [2] * 4096)
    codes = np.array([c.group_codes for c in coded])
    ratio = 255 * x[0].abs().double().view(16, 16).amax(1).numpy() / coded[0].scale
    assert set(np.unique(codes - np.floor(ratio))) == {0, 1}
    standard_error = np.sqrt((ratio % 1) * (1 - ratio % 1) / 4096)
    assert (np.abs(codes.mean(0) - ratio) <= 5 * standard_error + 1e-3).all()


def shaped_row():
    """Return float32[256] with every kind of entry: both signs, zero, tiny, levels, maxima."""
    row = random_rows(1, seed=3, spread=1.5)[0]
    row[:16] = torch.linspace(-1, 1, 16)
    row[16:32] = 1e-4 * torch.arange(16)
    row[32:48] = torch.tensor([1.0, *[0.0] * 15])
    row[48:64] = torch.tensor([-2.0, *torch.linspace(0, 2, 15)])
    return row


@every_width
@both_group_scales
def test_stochastic_rounding_is_unbiased(width, group_scales):
    """The mean over 4096 draws is within 5 standard errors at every entry."""
    draws = 4096
    x = shaped_row()
    out = quantized(x.expand(draws, 256).contiguous(), width, group_scales=group_scales)
    error = out.double() - x.double()
    standard_error = error.std(0) / draws**0.5
    assert (error.mean(0).abs() <= 5 * standard_error + rare(x, width, draws)).all()
    assert (standard_error > 0).sum() > 200, "most entries are really rounded"


def rare(x, width, draws):
    """Return how much the mean of x: float32[256] may be off since rare outcomes did not occur."""
    if width == 16:
        return 12 * x.abs() * 2.0**-7 / draws
    gap = np.diff(oracle.values_of_codes(width, oracle.EPSILON.get(width, 0.0))).max()
    return 12 * gap * x.view(16, 16).abs().amax(1).repeat_interleave(16) / draws


@every_width
def test_the_mean_error_shrinks_as_one_over_the_root_of_the_draws(width):
    x = shaped_row()
    error = quantized(x.expand(8192, 256).contiguous(), width).double() - x.double()
    rms = {k: error.view(k, -1, 256).mean(0).square().mean().sqrt().item() for k in (1, 32, 1024)}
    for few, many in ((1, 32), (32, 1024)):
        assert rms[few] / rms[many] == pytest.approx(32**0.5, rel=0.25)


@pytest.mark.parametrize("change", ["seed", "call", "hop", "sender"])
@every_width
def test_every_part_of_the_address_draws_anew(width, change):
    """Errors of messages that differ in one part are independent, so they do not add up."""
    x = random_rows(256, seed=8)
    size = x.abs() if width == 16 else x.view(-1, 16, 16).abs().amax(2).repeat_interleave(16, dim=1)
    options = [{"group_scales": "up", "address": address(**{change: i})} for i in (2, 3)]
    errors = [(quantized(x, width, **o) - x) / size.clamp(min=1e-6) for o in options]
    assert abs(correlation(*errors)) < 5 / x.numel() ** 0.5


@pytest.mark.parametrize("change", ["seed", "call", "hop", "sender"])
def test_every_part_of_the_address_draws_group_scales_anew(change):
    x = random_rows(512, seed=8)
    codes = []
    for i in (2, 3):
        coded, _ = oracle.read_tile(encode(x, 2, address=address(**{change: i}))[0], [2] * 512)
        codes.append(torch.tensor(np.array([c.group_codes for c in coded])))
    ratio = 255 * x.view(-1, 16, 16).abs().amax(2) / torch.tensor([[c.scale] for c in coded])
    errors = [c - ratio for c in codes]
    assert abs(correlation(*errors)) < 5 / ratio.numel() ** 0.5


def correlation(a, b):
    return torch.corrcoef(torch.stack([a, b]).flatten(1).double())[0, 1].item()


def test_the_same_address_draws_the_same():
    x = random_rows(8)
    assert torch.equal(encode(x, 4)[0], encode(x, 4)[0])


@every_scaled_width
def test_nearest_takes_the_nearest_level_and_no_random_number(width):
    x = random_rows(100)
    out = quantized(x, width, rounding="nearest", group_scales="up")
    other = quantized(
        x, width, rounding="nearest", group_scales="up", address=address(9, 9, 9, 0, 5)
    )
    assert torch.equal(out, other)
    payload, *_ = encode(x, width, rounding="nearest", group_scales="up")
    coded, _ = oracle.read_tile(payload, [width] * 100)
    table = oracle.values_of_codes(width, oracle.EPSILON.get(width, 0.0))
    for c, row in zip(coded, x.double().numpy(), strict=True):
        scale = (c.scale * c.group_codes / 255).repeat(16)
        best = np.abs(row[:, None] - scale[:, None] * table).min(1)
        assert (np.abs(c.decoded() - row) <= best * (1 + 1e-5) + 1e-6 * scale).all()


def test_nearest_rounds_ties_towards_zero():
    """An entry half way between two levels is not below its fraction, for either sign."""
    x = torch.full((2, 256), 0.5)
    x[1] = -0.5
    x[:, ::16] = 1.0
    out = quantized(x, 2, rounding="nearest", group_scales="up")
    assert torch.equal(out, (x == 1.0).float())


# Correlated rounding. With the group's maximum 1 and levels 0 and 1, a fraction of k / n is
# rounded up exactly where the sender's stratum is below k: so codes show the strata.


def strata(world_size, *, count=64, call=2, seed=1, hop_of=lambda sender: 0, sign=1.0):
    """Return int[n, count, 240]: the stratum of every sender at every entry but the maxima's."""
    inner = torch.ones(256, dtype=torch.bool)
    inner[::16] = False
    below = torch.zeros(world_size, count, 240, dtype=torch.int64)
    for sender in range(world_size):
        where = address(seed, call, hop_of(sender), sender, world_size)
        for k in range(1, world_size):
            x = torch.full((count, 256), sign * k / world_size)
            x[:, ~inner] = 1.0
            out = quantized(x, 2, rounding="correlated", address=where)[:, inner]
            below[sender] += out.abs() != (1 if sign > 0 else 0)
    return below


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8])
def test_strata_are_a_permutation_of_the_ranks_at_every_entry(world_size):
    ranks = torch.arange(world_size)[:, None, None]
    assert torch.equal(strata(world_size).sort(dim=0).values, ranks.expand(world_size, 64, 240))


def test_strata_are_the_same_at_every_hop_and_for_both_signs():
    """Along a ring every rank compresses a chunk at another hop; all strata must be met."""
    here = strata(4)
    assert torch.equal(here, strata(4, hop_of=lambda sender: 3 - sender))
    assert torch.equal(here, strata(4, sign=-1.0))


@pytest.mark.parametrize("change", [{"call": 3}, {"seed": 2}])
def test_strata_are_dealt_anew(change):
    agree = (strata(4) == strata(4, **change)).double().mean().item()
    assert agree == pytest.approx(1 / 4, abs=0.02)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_permutation_is_equally_likely(world_size):
    """And independent from entry to entry: pairs of neighbours are equally likely, too."""
    dealt = strata(world_size, count=160)
    codes = sum(dealt[rank] * world_size**rank for rank in range(world_size))
    every = [
        sum(p[rank] * world_size**rank for rank in range(world_size))
        for p in permutations(range(world_size))
    ]
    assert _chi_square(codes.flatten(), every) < 5
    pairs = codes[:, 0::2] * 1000 + codes[:, 1::2]
    assert _chi_square(pairs.flatten(), [a * 1000 + b for a in every for b in every]) < 5


def _chi_square(values, kinds):
    """Return how many standard deviations the statistic is above its mean; checks the kinds."""
    counts = torch.tensor([(values == kind).sum() for kind in kinds]).double()
    assert counts.sum() == values.numel()
    expected = values.numel() / len(kinds)
    freedom = len(kinds) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / (2 * freedom) ** 0.5


@every_scaled_width
def test_correlated_rounding_is_unbiased_at_every_rank(width):
    draws = 4096
    x = shaped_row()
    for sender in (0, 2):
        out = quantized(
            x.expand(draws, 256).contiguous(),
            width,
            rounding="correlated",
            address=address(sender=sender),
        )
        error = out.double() - x.double()
        bound = 5 * error.std(0) / draws**0.5 + rare(x, width, draws)
        assert (error.mean(0).abs() <= bound).all()


@every_levelled_width
@pytest.mark.parametrize("signs", ["equal", "random"])
def test_correlated_errors_of_many_ranks_cancel(width, signs):
    """In value space: also where ranks have opposite signs."""
    n = 8
    x = random_rows(64, seed=5).abs().expand(n, 64, 256).clone()
    if signs == "random":
        generator = torch.Generator().manual_seed(0)
        x *= torch.randint(0, 2, (n, 1, 1), generator=generator) * 2.0 - 1.0

    def squared_error(rounding):
        total = sum(
            quantized(
                x[r],
                width,
                rounding=rounding,
                group_scales="up",
                address=address(sender=r, world_size=n),
            )
            for r in range(n)
        )
        return (total - x.sum(0)).square().sum().item()

    assert squared_error("correlated") < 0.5 * squared_error("stochastic")


def test_correlated_rounding_is_in_value_space():
    """Shifting values by a whole level shifts what is decoded by as much, across zero."""
    fraction = torch.linspace(0.01, 0.99, 256).expand(32, 256).clone()
    fraction[:, ::16] = 1.0
    shifted = fraction - 1.0
    shifted[:, ::16] = -1.0
    out = quantized(fraction, 2, rounding="correlated")
    below = quantized(shifted, 2, rounding="correlated")
    inner = torch.ones(256, dtype=torch.bool)
    inner[::16] = False
    agree = (out[:, inner] - 1.0 == below[:, inner]).double().mean().item()
    assert agree > 0.999
