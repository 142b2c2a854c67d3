"""How large the error of each width is: the shipped tables and the closed form, through kernels."""

import pytest
import torch

from dynamiq.compressors.dynamiq.compressor import WIDTHS
from dynamiq.compressors.dynamiq.errors import (
    ASSUMED_SHAPES,
    GAUSSIAN_SHAPES,
    PEAKS,
    band_errors,
    noise_peaks,
    roughness,
    shape_of,
    shipped_errors,
)
from evaluation.relative_errors import RECIPES, quantised, quantizer_of, relative_error

SUPERGROUPS = 3000

every_recipe = pytest.mark.parametrize(("rounding", "group_scales"), RECIPES, ids=str)
with_and_without_groups = pytest.mark.parametrize("group_scales", [None, "up"])


def drawn(distribution, seed=1):
    """Return float32[supergroups, 256] of independent entries, or of groups with a spike each."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SUPERGROUPS, 256, generator=generator)
    if distribution == "Laplace":
        # The difference of two exponential variables.
        u = torch.rand(2, SUPERGROUPS, 256, generator=generator)
        return (1 - u).log().diff(dim=0)[0]
    if distribution == "spikes":
        x *= 0.01
        x[:, 3::16] += 1 + torch.rand(SUPERGROUPS, 16, generator=generator)
    return x


@pytest.fixture
def sample(gradients):
    """Return supergroups float32[k, 256] of one rank's real gradients, each with its largest at 1.

    Errors are relative: how large a supergroup is does not matter.
    """
    x = gradients[0].view(-1, 256)
    return x / x.abs().amax(1, keepdim=True)


@every_recipe
def test_shipped_errors_are_what_kernels_do_to_entries(rounding, group_scales, sample):
    """Gaussian ones; real gradients' where dithered codes have scales for groups."""
    quantizer = quantizer_of(rounding, group_scales)
    assert quantizer.widths == WIDTHS
    is_local = (rounding, group_scales) == ("dithered", "up")
    x = sample if is_local else drawn("Gaussian")
    measured = [relative_error(x, quantizer, width) for width in WIDTHS[:-1]]
    shipped = list(shipped_errors(quantizer))
    assert measured == pytest.approx(shipped[:-1], rel=0.03 if is_local else 0.02)
    measured = relative_error(drawn("Gaussian"), quantizer, 16)
    assert measured == pytest.approx(shipped[-1], rel=0.02)


def test_correlated_rounding_errs_like_stochastic_rounding():
    """Alone, one message of one rank."""
    quantizer = quantizer_of("correlated", "stochastic")
    assert shipped_errors(quantizer) == shipped_errors(quantizer_of("stochastic", "stochastic"))
    x = drawn("Gaussian")
    measured = [relative_error(x, quantizer, width) for width in (2, 4, 8)]
    expected = [shipped_errors(quantizer)[width - 1] for width in (2, 4, 8)]
    assert measured == pytest.approx(expected, rel=0.02)


@with_and_without_groups
def test_shipped_shapes(group_scales, sample):
    has_groups = group_scales is not None
    shape = shape_of(drawn("Gaussian"), group_scales).mean(0).tolist()
    assert shape == pytest.approx(GAUSSIAN_SHAPES[has_groups], rel=0.01)
    assumed = shape_of(sample if has_groups else drawn("Gaussian"), group_scales).mean(0)
    assert assumed.tolist() == pytest.approx(ASSUMED_SHAPES[has_groups], rel=0.02)


@with_and_without_groups
@pytest.mark.parametrize("distribution", ["Gaussian", "Laplace", "spikes"])
def test_closed_form_of_dithered_errors(distribution, group_scales):
    """From three numbers, for entries of any kind: 1 to 10 bits."""
    quantizer = quantizer_of("dithered", group_scales)
    x = drawn(distribution)
    expected = band_errors(quantizer, shape_of(x, group_scales).mean(0, keepdim=True))[0]
    measured = [relative_error(x, quantizer, width) for width in WIDTHS[:-1]]
    assert measured == pytest.approx(expected[:-1].tolist(), rel=0.01)


@with_and_without_groups
def test_shapes_do_not_depend_on_scale(group_scales):
    x = drawn("Laplace")[:64]
    shapes = shape_of(x, group_scales)
    assert torch.equal(shape_of(x * 2.0**-40, group_scales), shapes)
    assert shape_of(torch.zeros(1, 256), group_scales).isnan().all(), "zeros have none"


@with_and_without_groups
def test_bands_of_which_nothing_is_known_have_the_assumed_shape(group_scales):
    shapes = torch.zeros(2, 3, dtype=torch.float64)
    shapes[1] = torch.tensor(ASSUMED_SHAPES[group_scales is not None], dtype=torch.float64)
    for rounding in ("dithered", "stochastic"):
        quantizer = quantizer_of(rounding, group_scales)
        shipped = torch.tensor(shipped_errors(quantizer), dtype=torch.float64)
        assert torch.allclose(band_errors(quantizer, shapes), shipped.expand(2, -1), rtol=1e-12)
        assert roughness(quantizer, shapes).tolist() == pytest.approx([1.0, 1.0], rel=1e-12)
        pi = noise_peaks(quantizer, shapes)
        assert pi[0] == pi[1]


@with_and_without_groups
def test_roughness_is_what_entries_err_more_than_shipped_ones(group_scales):
    """At four bits."""
    quantizer = quantizer_of("dithered", group_scales)
    x = drawn("spikes")
    rough = roughness(quantizer, shape_of(x, group_scales).mean(0, keepdim=True)).item()
    measured = relative_error(x, quantizer, 4) / shipped_errors(quantizer)[3]
    assert rough == pytest.approx(measured, rel=0.01)


def gaussian_error(quantizer, width):
    shape = GAUSSIAN_SHAPES[quantizer.group_scales is not None]
    errors = band_errors(quantizer, torch.tensor([shape], dtype=torch.float64))
    return errors[0, width - 1].item()


def chain(quantizer, width):
    """Return the noise, per entry, of eight Gaussian ranks' sums on a ring, hop by hop."""
    generator = torch.Generator().manual_seed(3)
    arrived = exact = torch.zeros(1000, 256)
    noise = []
    for hop in range(8):
        x = torch.randn(1000, 256, generator=generator)
        exact = exact + x
        arrived = quantised(arrived + x, quantizer, width, seed=hop)
        noise.append((arrived - exact).double().square().mean().item())
    return noise


@with_and_without_groups
@pytest.mark.parametrize("width", [2, 3, 4, 6])
def test_peaks_say_how_noise_compounds_along_a_ring(group_scales, width):
    """N ← N + e (E + π N) over eight hops: nine tenths of it at two bits is compounded noise."""
    quantizer = quantizer_of("dithered", group_scales)
    e = gaussian_error(quantizer, width)
    pi = PEAKS[group_scales is not None]
    modelled = [0.0]
    for hop in range(8):
        modelled.append(modelled[-1] + e * (hop + 1 + pi * modelled[-1]))
    assert chain(quantizer, width) == pytest.approx(modelled[1:], rel=0.12)
    # The last counts: it is the message that all ranks decode.
    assert chain(quantizer, width)[-1] == pytest.approx(modelled[-1], rel=0.07)


@pytest.mark.parametrize("group_scales", [None, "up"])
def test_one_bit_compounds_as_modelled(group_scales):
    """1.8 or 1.4 times the energy at every hop: within a fifth after eight hops."""
    quantizer = quantizer_of("dithered", group_scales)
    e, pi, noise = gaussian_error(quantizer, 1), PEAKS[group_scales is not None], 0.0
    for hop in range(8):
        noise += e * (hop + 1 + pi * noise)
    assert chain(quantizer, 1)[-1] == pytest.approx(noise, rel=0.25)


def test_noise_counts_less_the_more_peaked_entries_are():
    gaussian = torch.tensor(GAUSSIAN_SHAPES[False], dtype=torch.float64)
    shapes = torch.stack([torch.zeros(3).double(), gaussian, gaussian * 2])
    dithered = noise_peaks(quantizer_of("dithered", None), shapes).tolist()
    assert dithered == pytest.approx([PEAKS[False], PEAKS[False], PEAKS[False] / 2])
    assert noise_peaks(quantizer_of("stochastic", None), shapes).tolist() == [1.0, 1.0, 1.0]
