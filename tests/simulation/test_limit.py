"""The rate-distortion limit against hand calculation and a search for the water level."""

import pytest
import torch

from dynamiq.simulation.limit import rate_distortion_limit


def with_energies(*variances, last=256):
    """Return a sum whose supergroups have these variances, the last one shorter."""
    signs = torch.ones(256)
    signs[::2] = -1.0
    blocks = [signs * variance**0.5 for variance in variances]
    blocks[-1] = blocks[-1][:last]
    return torch.cat(blocks)


def searched(variances, counts, bits):
    """Find the level by bisection in log θ."""
    low, high = -200.0, 100.0
    for _ in range(200):
        middle = (low + high) / 2
        rate = (counts * 0.5 * (variances.log2() - middle).clamp(min=0.0)).sum() / counts.sum()
        low, high = (middle, high) if rate > bits else (low, middle)
    distortion = (counts * variances.clamp(max=2.0**high)).sum()
    return (distortion / (counts * variances).sum()).item()


def test_of_one_variance_each_bit_divides_it_by_four():
    limits = rate_distortion_limit(with_energies(3.0, 3.0), [0, 1, 2, 5.5])
    assert limits == pytest.approx([4.0**-bits for bits in (0, 1, 2, 5.5)], rel=1e-6)


def test_water_is_poured_on_the_largest_first():
    # θ = 2 costs half of the entries ½ log₂(4/2) bits, and leaves 2 + 1 of 5.
    assert rate_distortion_limit(with_energies(1.0, 4.0), [0.25]) == pytest.approx([0.6], rel=1e-6)
    # θ = 1/4: ½ (log₂ 16 + log₂ 4) / 2 = 1.5 bits.
    assert rate_distortion_limit(with_energies(1.0, 4.0), [1.5]) == pytest.approx([0.1], rel=1e-6)


@pytest.mark.parametrize("last", [256, 100])
def test_any_spectrum_against_a_search(last):
    generator = torch.Generator().manual_seed(0)
    variances = torch.randn(40, generator=generator, dtype=torch.float64).mul(4.0).exp()
    counts = torch.full((40,), 256.0, dtype=torch.float64)
    counts[-1] = last
    bits = [0.1, 0.5, 1.0, 2.0, 3.0, 5.0, 8.0]
    limits = rate_distortion_limit(with_energies(*variances.tolist(), last=last), bits)
    expected = [searched(variances, counts, rate) for rate in bits]
    assert limits == pytest.approx(expected, rel=1e-5)


def test_what_is_zero_takes_no_bits():
    # Half of the entries get all bits: twice as many each.
    assert rate_distortion_limit(with_energies(0.0, 1.0), [2.0]) == pytest.approx([4.0**-4])
    assert rate_distortion_limit(torch.zeros(300), [1.0, 2.0]) == [0.0, 0.0]
