"""Spectra: to JSON and back, small, and measured as they are."""

import json

import pytest
import torch

from dynamiq import DynamiQCompressor, Ring
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.planner.errors.observation import Observed, observe, quantiles, spectrum_of
from dynamiq.planner.errors.prediction import predicted_vnmse
from dynamiq.planner.profiles.spectrum import BANDS, PEAKS, POINTS, GradientSpectrum
from dynamiq.simulation.sources import Drawn


def drawn(count: int, correlation: float = 0.25) -> Drawn:
    return Drawn(2.0 ** -(torch.arange(count) * (20 / count)), correlation, seed=1)


def test_json() -> None:
    spectrum = spectrum_of(drawn(700).matrix(4))
    text = spectrum.model_dump_json()
    assert GradientSpectrum.model_validate_json(text) == spectrum
    assert GradientSpectrum(**json.loads(json.dumps(spectrum.to_dict()))) == spectrum
    assert len(spectrum.energies) == POINTS
    assert len(text) < 32_768


def test_refused() -> None:
    good = {"energies": [1.0], "world_size": 8, "correlation": 0.1}
    for change, message in (
        ({"version": 2}, "version=2"),
        ({"energies": []}, "energies"),
        ({"energies": [1.0, -1.0]}, "energies.1=-1.0"),
        ({"energies": [float("nan")]}, "energies.0=nan"),
        ({"correlation": 1.5}, "correlation=1.5"),
        ({"peaks": [1.0]}, f"peaks has 1 values; it takes {PEAKS}"),
        ({"colour": 1}, "colour"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            GradientSpectrum(**{**good, **change})


def test_measured() -> None:
    """Energies, correlation and shapes of what was drawn."""
    source = drawn(400)
    spectrum = spectrum_of(source.matrix(6))
    expected = 6 * 256 * source.deviations.double().square()
    assert torch.tensor(spectrum.energies).double() == pytest.approx(expected, rel=0.2)
    assert spectrum.correlation == pytest.approx(0.25, abs=0.03)
    assert len(spectrum.bands) == BANDS
    for band in spectrum.bands:
        assert band.correlation == pytest.approx(0.25, abs=0.06)
        assert band.rotated == pytest.approx((9.48, 1.712, 0.677), rel=0.1)
        assert band.grouped == pytest.approx((4.58, 1.388, 0.833), rel=0.1)
    assert sum(spectrum.peaks) == pytest.approx(1.0)
    assert spectrum.evenness == pytest.approx(1.0, abs=0.05)
    assert spectrum.unevenness < 0.1
    assert spectrum.dtype == "float32"
    assert spectrum_of(source.matrix(2).bfloat16().float()).dtype == "bfloat16"


def test_one_rank_has_it_all() -> None:
    x = drawn(100).matrix(4)
    x[1:] = 0.0
    spectrum = spectrum_of(x)
    assert spectrum.evenness == pytest.approx(0.25)
    assert spectrum.unevenness == pytest.approx(3**0.5)
    assert spectrum.correlation == 0.0


def test_few_numbers_lose_nothing() -> None:
    """512 energies of 4000 predict what all of them do."""
    energies = drawn(4000).deviations.double().square()
    every = GradientSpectrum(energies=tuple(energies.tolist()), world_size=8, correlation=0.1)
    means = quantiles(energies, torch.ones(4000), POINTS)
    assert means.sum() * (4000 / POINTS) == pytest.approx(energies.sum().item())
    few = every.model_copy(update={"energies": tuple(means.tolist())})
    for bits in (3, 5):
        compressor = DynamiQCompressor(bits)
        a, b = (predicted_vnmse(compressor, Ring(), 8, spectrum) for spectrum in (every, few))
        assert a == pytest.approx(b, rel=0.01)


def test_noisy_sums() -> None:
    """How alike ranks are is seen through the noise of a compressed sum."""
    x = drawn(300).matrix(4)
    total = x.sum(0)
    generator = torch.Generator().manual_seed(0)
    noisy = total + total.square().mean().sqrt() * 0.3 * torch.randn(
        total.shape, generator=generator
    )
    found = []
    for summed in (total, noisy):
        observed = Observed()
        observed.add("", torch.stack([observe(row, summed) for row in x]).sum(0), 4)
        found.append(observed.spectrum().correlation)
    assert found[0] == pytest.approx(found[1], abs=0.02)


def test_nothing_to_learn_from() -> None:
    for bad, message in (
        (torch.zeros(3), "ranks, entries"),
        (torch.zeros(1, 512), "two ranks"),
        (torch.full((2, 512), torch.nan), "NaN"),
        (torch.zeros(2, 512), "no gradient"),
    ):
        with pytest.raises(InputError, match=message):
            spectrum_of(bad)
