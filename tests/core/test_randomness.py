"""The counter-based generator: the bits that every kernel must give, and their statistics."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core import randomness
from dynamiq.core.randomness import Stream, key, stochastic_bfloat16, uniform, words

MASK64 = 2**64 - 1
MASK32 = 2**32 - 1
ADDRESS = {"seed": 11, "call": 5, "stream": Stream.ENTRY, "hop": 2, "sender": 3}
BLOCKS = 4096
ALL_NOISE = (torch.arange(1 << 16, dtype=torch.int64) << 16).to(torch.int32)
"""Every value of the upper 16 bits of a word."""


def draw(**changes):
    """Return float64[blocks * 256] uniforms of an address."""
    address = ADDRESS | changes
    return uniform(words(key(*address.values()), torch.arange(BLOCKS))).double().view(-1)


def mix64(x):
    """SplitMix64's finaliser in Python's integers."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31


def word(stream_key, block, lane):
    """One word in Python's integers: a second implementation, written from the description."""
    block_key = mix64(stream_key + (block + 1) * 0x9E3779B97F4A7C15 & MASK64)
    x = (block_key & MASK32) + lane * 0x9E3779B1 & MASK32
    x = (x ^ x >> 16) * 0x7FEB352D & MASK32
    x ^= x >> 15
    x = (x + (block_key >> 32) & MASK32) * 0x846CA68B & MASK32
    return x ^ x >> 16


class TestGoldenValues:
    """Changing one of these makes old and new versions decode garbage from each other."""

    @pytest.mark.parametrize(
        ("parts", "expected"),
        [
            ((), 0),
            ((0,), 0xE220A8397B1DCDAF),  # SplitMix64's first output for seed 0,
            ((1,), 0x910A2DEC89025CC1),  # and for seed 1
            ((0, 0), 0xA706DD2F4D197E6F),
            ((1, 2, 3), 0x6AE515C1C0AC7E37),
            ((-1,), 0xE4D971771B652C20),
            ((MASK64,), 0xE4D971771B652C20),
        ],
    )
    def test_keys(self, parts, expected):
        assert key(*parts) == expected

    def test_words(self):
        drawn = words(key(1, 2, 3), torch.tensor([0, 1, 2**40]))

        assert drawn.dtype == torch.int32
        assert drawn.shape == (3, 256)
        assert [[x & MASK32 for x in row] for row in drawn[:, [0, 1, 2, 255]].tolist()] == [
            [1572216479, 3884440508, 2880196196, 647263063],
            [211162840, 2739604501, 876441709, 3256040129],
            [2653438085, 4132154929, 3181681022, 3120689183],
        ]

    def test_uniforms(self):
        drawn = uniform(words(key(1, 2, 3), torch.tensor([0, 1])))[:, :2]

        assert [[x.hex() for x in row] for row in drawn.tolist()] == [
            ["0x1.76d87c0000000p-2", "0x1.cf0fb60000000p-1"],
            ["0x1.92c2e00000000p-5", "0x1.46961a0000000p-1"],
        ]

    def test_streams_keep_their_numbers(self):
        assert [(s.name, s.value) for s in Stream][:4] == [
            ("STATISTICS", 1),
            ("ENTRY", 2),
            ("STRATUM", 3),
            ("GROUP_SCALE", 4),
        ]


class TestWords:
    @given(st.integers(0, MASK64), st.integers(0, 2**62), st.integers(0, 255))
    def test_equal_a_second_implementation(self, stream_key, block, lane):
        drawn = words(stream_key, torch.tensor([block]))[0, lane].item()

        assert drawn & MASK32 == word(stream_key, block, lane)

    def test_are_a_function_of_block_and_lane_alone(self):
        whole = words(key(9), torch.arange(64))

        assert torch.equal(words(key(9), torch.tensor([63, 5, 5])), whole[[63, 5, 5]])
        assert torch.equal(words(key(9), torch.arange(64), lanes=16), whole[:, :16])
        assert torch.equal(words(key(9), torch.arange(0, 64, 2)), whole[::2])

    def test_of_no_blocks_are_none(self):
        assert words(key(9), torch.arange(0)).shape == (0, 256)

    def test_leave_the_generator_of_torch_alone(self):
        before = torch.random.get_rng_state()
        words(key(9), torch.arange(64))

        assert torch.equal(torch.random.get_rng_state(), before)

    @pytest.mark.parametrize("bit", range(32))
    def test_every_bit_is_fair(self, bit):
        drawn = words(key(*ADDRESS.values()), torch.arange(BLOCKS))
        ones = (drawn >> bit & 1).double().mean().item()

        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(drawn.numel())

    @pytest.mark.parametrize("bits", ["low", "high"])
    def test_bytes_are_uniform(self, bits):
        drawn = words(key(*ADDRESS.values()), torch.arange(BLOCKS)).view(-1)
        values = (drawn if bits == "low" else drawn >> 24) & 0xFF

        assert chi_square_z(torch.bincount(values, minlength=256)) < 5

    def test_neighbouring_addresses_change_half_the_bits(self):
        """No part of an address is a weak one."""
        base = words(key(*ADDRESS.values()), torch.arange(BLOCKS))
        for part, value in ADDRESS.items():
            changed = words(key(*(ADDRESS | {part: value + 1}).values()), torch.arange(BLOCKS))
            flipped = sum((base ^ changed) >> bit & 1 for bit in range(32)).double().mean()
            assert flipped.item() == pytest.approx(16.0, abs=0.02), part


def chi_square_z(counts):
    """Return how many standard deviations a chi-square over equal cells is from its mean."""
    cells = counts.numel()
    expected = counts.sum() / cells
    chi_square = ((counts - expected).double().square() / expected).sum().item()
    return abs(chi_square - (cells - 1)) / math.sqrt(2 * (cells - 1))


def assert_independent(u, v):
    """Check correlation, and the joint distribution on a grid of 16 x 16 cells."""
    count = u.numel()
    correlation = torch.corrcoef(torch.stack([u, v]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(count)
    cells = (u * 16).long() * 16 + (v * 16).long()
    assert chi_square_z(torch.bincount(cells, minlength=256)) < 5


class TestUniform:
    def test_lies_strictly_inside_the_unit_interval(self):
        extremes = uniform(torch.tensor([0, -1, 2**31 - 1, -(2**31)], dtype=torch.int32))

        assert extremes.tolist() == [2.0**-24, 1 - 2.0**-24, 0.5 - 2.0**-24, 0.5 + 2.0**-24]

    def test_is_symmetric(self):
        drawn = words(key(1), torch.arange(16))

        assert torch.equal(uniform(~drawn), 1.0 - uniform(drawn))

    def test_values_and_their_complements_are_exact(self):
        every = torch.arange(0, 2**32, 2**9 * 97, dtype=torch.int64).to(torch.int32)
        u = uniform(every)

        assert torch.equal((1.0 - u).double(), 1.0 - u.double())
        assert torch.equal(u.double() * 2**24 % 2, torch.ones(u.numel(), dtype=torch.float64))

    def test_is_uniform(self):
        u = draw()

        assert chi_square_z(torch.bincount((u * 1024).long(), minlength=1024)) < 5
        assert u.mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(12 * u.numel()))
        assert u.var().item() == pytest.approx(1 / 12, abs=1e-3)

    @pytest.mark.parametrize("distance", [1, 2, 16, 128, 255])
    def test_lanes_are_independent(self, distance):
        u = draw().view(BLOCKS, 256)

        assert_independent(u[:, :-distance].reshape(-1), u[:, distance:].reshape(-1))

    @pytest.mark.parametrize("distance", [1, 2, 16, 256])
    def test_blocks_are_independent(self, distance):
        u = draw().view(BLOCKS, 256)

        assert_independent(u[:-distance].reshape(-1), u[distance:].reshape(-1))

    @pytest.mark.parametrize("part", ADDRESS)
    @pytest.mark.parametrize("distance", [1, 2])
    def test_every_part_of_an_address_makes_it_independent(self, part, distance):
        assert_independent(draw(), draw(**{part: ADDRESS[part] + distance}))

    def test_exchanging_parts_of_an_address_makes_it_independent(self):
        assert_independent(draw(hop=1, sender=2), draw(hop=2, sender=1))

    def test_sums_over_many_senders_are_as_wide_as_independence_says(self):
        """What unbiased rounding relies on when ranks' errors are added."""
        total = sum(draw(sender=sender) for sender in range(16))

        assert total.var().item() == pytest.approx(16 / 12, rel=0.01)


class TestStochasticBfloat16:
    @pytest.mark.parametrize(
        "value",
        [1.0001, -1.0001, 3.14159, 1e-30, -2.7e38, 1.99999, 1.2e-38, 3e-40, -1e-44, 255.99],
    )
    def test_rounds_up_exactly_as_often_as_distance_says(self, value):
        """Over all 65536 values of the noise: the mean is the value itself, to the last bit."""
        x = torch.tensor(value)
        rounded = stochastic_bfloat16(x.expand(ALL_NOISE.shape), ALL_NOISE).double()

        assert rounded.unique().numel() <= 2
        assert rounded.mean().item() == x.double().item()
        assert all(
            abs(r - value) <= 2**-7 * abs(value) + 2**-133 for r in rounded.unique().tolist()
        )

    def test_keeps_every_representable_value(self):
        every = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16)
        for noise in (0, 0x7FFFFFFF, -1):
            rounded = stochastic_bfloat16(every.float(), torch.full((1 << 16,), noise).int())
            same = rounded.view(torch.int16) == every.view(torch.int16)
            assert (same | (every.isnan() & rounded.isnan())).all()

    def test_finite_values_stay_finite(self):
        largest = torch.finfo(torch.float32).max
        x = torch.tensor([largest, -largest, 3.3961e38, -3.3961e38])
        for noise in (0, -1):
            rounded = stochastic_bfloat16(x, torch.full((4,), noise).int())
            limit = torch.finfo(torch.bfloat16).max
            assert rounded.abs().tolist() == [limit] * 4
            assert torch.equal(rounded.sign().float(), x.sign())

    def test_non_finite_values_pass(self):
        x = torch.tensor([math.inf, -math.inf, math.nan])
        rounded = stochastic_bfloat16(x, torch.full((3,), -1).int())

        assert rounded[:2].tolist() == [math.inf, -math.inf]
        assert rounded[2].isnan()

    def test_takes_any_shape_and_strides(self):
        x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        noise = words(key(1), torch.arange(1))[0, :48].view(6, 8)
        whole = stochastic_bfloat16(x, noise)

        assert whole.shape == x.shape
        assert torch.equal(stochastic_bfloat16(x[:, ::2], noise[:, ::2]), whole[:, ::2])
        assert torch.equal(stochastic_bfloat16(x.T, noise.T), whole.T)
        assert stochastic_bfloat16(x[:0], noise[:0]).shape == (0, 8)
        assert torch.equal(stochastic_bfloat16(x[0, 0], noise[0, 0]), whole[0, 0])

    def test_leaves_its_input_alone(self):
        x = torch.tensor([3.4e38, 1.0001])
        stochastic_bfloat16(x, torch.tensor([-1, -1]).int())

        assert torch.equal(x, torch.tensor([3.4e38, 1.0001]))


def test_block_size_is_the_supergroup():
    assert randomness.BLOCK == 256
