"""Energy and mean of supergroups, from zero to the end of FP32's range."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynamiq.core import randomness
from dynamiq.kernels.supergroups import ops
from dynamiq.kernels.supergroups.operands import Bucket
from tests.kernels.supergroups.operations import bucket_of

MAX = torch.finfo(torch.float32).max
TINY = 2.0**-149
"""The smallest subnormal."""


def ragged(x, counts):
    """Return the first entries of the rows of x[s, 256] as supergroups, each a chunk of its own."""
    entries = x[torch.arange(256) < counts[:, None]]
    return Bucket(entries, torch.nn.functional.pad(counts.cumsum(0), (1, 0)), positions=1)


def statistics(row, count=256, world_size=8):
    """Return energy and mean of one supergroup whose first entries are ``row``."""
    x = torch.zeros(1, 256)
    x[0, : len(row)] = torch.as_tensor(row, dtype=torch.float32)
    energy, mean = ops.statistics(ragged(x, torch.tensor([count])), world_size)
    assert energy.dtype == mean.dtype == torch.float32
    return energy.item(), mean.item()


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-51, 1e-8, 1.0, 3e4, 2.0**49, 2.0**51, 2.0**55])
def test_values(scale):
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0)) * scale + 0.1 * scale
    counts = torch.arange(40) * 6 + 1
    x[torch.arange(256)[None, :] >= counts[:, None]] = 0.0

    energy, mean = ops.statistics(ragged(x, counts), 8)

    limit = 2.0**-126
    expected = x.double().square().sum(1).clamp(min=limit)
    torch.testing.assert_close(energy.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        mean.double(), x.double().sum(1) / counts, rtol=1e-6, atol=1e-6 * scale
    )


def test_sums_follow_the_written_tree():
    """Entry i and i + 128 first, then i + 64, ...: other orders give other bits."""
    x = np.random.default_rng(0).normal(size=(500, 256)).astype(np.float32)
    energy, mean = x * x, x
    while energy.shape[1] > 1:
        half = energy.shape[1] // 2
        energy, mean = energy[:, :half] + energy[:, half:], mean[:, :half] + mean[:, half:]

    ours = ops.statistics(bucket_of(torch.from_numpy(x)), 8)

    assert np.array_equal(ours[0].numpy(), energy[:, 0])
    assert np.array_equal(ours[1].numpy(), mean[:, 0] / np.float32(256))


def test_zeros_and_only_zeros_have_energy_zero():
    assert statistics([0.0, -0.0]) == (0.0, 0.0)
    assert statistics([TINY])[0] == 2.0**-126
    assert statistics([0.0] * 255 + [-TINY])[0] == 2.0**-126


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 8192])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_values_saturate(world_size, sign):
    energy, mean = statistics([sign * MAX] * 256, world_size=world_size)

    assert energy == pytest.approx(2.0**126 / world_size, rel=1e-6)
    assert mean == pytest.approx(sign * 2.0**126 / world_size, rel=1e-6)
    assert world_size * max(energy, abs(mean)) <= 2.0**126 * (1 + 1e-6)


@pytest.mark.parametrize("world_size", [2, 8, 64])
def test_a_long_ring_does_not_overflow_the_sum_of_saturated_energies(world_size):
    energy = torch.full((4096,), statistics([MAX] * 256, world_size=world_size)[0])
    total = torch.zeros(4096)
    for rank in range(world_size):
        words = randomness.words(randomness.key(rank), torch.arange(16)).view(-1)
        total = randomness.stochastic_bfloat16(total + energy, words).float()
    assert total.isfinite().all()
    assert total.min() > 2.0**125


def test_a_large_mean_within_the_limit_is_exact():
    assert statistics([1e37] * 256)[1] == pytest.approx(1e37, rel=1e-6)
    assert statistics([TINY] * 256)[1] == TINY


@pytest.mark.parametrize("place", [0, 1, 128, 255])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("others", [0.0, 1.0, MAX, TINY])
def test_a_non_finite_entry_shows_in_the_energy(value, place, others):
    row = [others] * 256
    row[place] = value
    assert not math.isfinite(statistics(row)[0])


def test_infinities_of_both_signs_do_not_cancel():
    assert not math.isfinite(statistics([math.inf, -math.inf])[0])


float32_bits = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(float32_bits, min_size=1, max_size=20), st.sampled_from([1, 3, 8, 1000]))
def test_any_bits(bits, world_size):
    """Zero iff all entries are zero, non-finite iff some entry is, otherwise within the limits."""
    x = torch.tensor(bits, dtype=torch.int32).view(torch.float32)

    energy, mean = statistics(x, len(bits), world_size)

    assert (energy == 0) == bool((x == 0).all())
    assert math.isfinite(energy) == bool(x.isfinite().all())
    if math.isfinite(energy) and energy:
        limit = 2.0**126 / world_size * (1 + 1e-6)
        assert 2.0**-126 <= energy <= limit
        exact = x.double().square().sum().clamp(2.0**-126, limit).item()
        assert energy == pytest.approx(exact, rel=1e-5)
        assert abs(mean) <= limit


def test_rows_do_not_influence_each_other():
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1))
    broken = x.clone()
    broken[1] = math.nan
    for clean, other in zip(
        ops.statistics(bucket_of(x), 4), ops.statistics(bucket_of(broken), 4), strict=True
    ):
        assert torch.equal(clean[::2], other[::2])


def test_no_supergroups():
    energy, mean = ops.statistics(bucket_of(torch.zeros(0, 256)), 4)
    assert energy.shape == mean.shape == (0,)
