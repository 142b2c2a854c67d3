"""Predicted errors against measured ones, and how they must change with ranks and bits."""

import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiq import (
    Butterfly,
    Compressor,
    Direct,
    DynamiQCompressor,
    ErrorFeedback,
    Hierarchical,
    MXCompressor,
    OmniReduceCompressor,
    Ring,
    THCCompressor,
    Topology,
    Uncompressed,
    measure_error,
)
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.planner.errors.observation import spectrum_of
from dynamiq.planner.errors.prediction import predicted_vnmse
from dynamiq.planner.profiles.spectrum import GradientSpectrum
from dynamiq.simulation.sources import read, resampled

PLAIN = GradientSpectrum(
    energies=tuple(2.0 ** -(i / 16) for i in range(256)), world_size=8, correlation=0.1
)
FORMATS: tuple[Compressor, ...] = (
    Uncompressed("bf16"),
    Uncompressed("fp16"),
    MXCompressor("mxfp8_e4m3"),
    MXCompressor("mxfp4_e2m1"),
    DynamiQCompressor(3),
    DynamiQCompressor(5),
    DynamiQCompressor.local(4),
    DynamiQCompressor.paper(5),
    THCCompressor(),
    OmniReduceCompressor(mode="topk", bit_budget=5),
)


@pytest.fixture(scope="module")
def sample() -> torch.Tensor:
    return read(Path(__file__).parents[1] / "data" / "smollm2_gradients.safetensors")


@pytest.mark.parametrize("topology", [Ring(), Butterfly()])
@pytest.mark.parametrize(
    ("compressor", "calls", "within"),
    [
        (Uncompressed("bf16"), 12, 0.25),  # one entry holds a quarter of the energy
        (DynamiQCompressor(3), 2, 0.18),
        (DynamiQCompressor(4), 2, 0.18),
        (DynamiQCompressor(5), 2, 0.15),
        (DynamiQCompressor(6), 2, 0.15),
    ],
)
def test_sample(
    sample: torch.Tensor, compressor: Compressor, calls: int, within: float, topology: Topology
) -> None:
    """The sample's own eight ranks, in several orders."""
    spectrum = spectrum_of(sample)
    measured = 0.0
    for call in range(calls):
        order = torch.randperm(8, generator=torch.Generator().manual_seed(call))
        warm_up = 2 if compressor.stateful else 0
        report = measure_error(
            sample[order], compressor, topology, seed=call, warm_up_calls=warm_up
        )
        measured += report.vnmse / calls
    predicted = predicted_vnmse(compressor, topology, 8, spectrum)
    assert predicted == pytest.approx(measured, rel=within)


@pytest.mark.parametrize("topology", [Ring(), Butterfly()])
@pytest.mark.parametrize("compressor", [Uncompressed("bf16"), MXCompressor("mxfp8_e4m3")])
def test_more_ranks(sample: torch.Tensor, compressor: Compressor, topology: Topology) -> None:
    """The spectrum of eight ranks tells the error of sixteen."""
    drawn = resampled(sample, None, 0)
    spectrum = spectrum_of(drawn.matrix(8))
    measured = measure_error(drawn.matrix(16), compressor, topology).vnmse
    assert predicted_vnmse(compressor, topology, 16, spectrum) == pytest.approx(measured, rel=0.15)


def test_hierarchy(sample: torch.Tensor) -> None:
    """Four nodes of two, BF16 between them and inside of them."""
    drawn = resampled(sample, None, 0)
    spectrum = spectrum_of(drawn.matrix(8))
    for local in (Uncompressed("fp32"), Uncompressed("bf16")):
        topology = Hierarchical(ranks_per_node=2, local=local)
        measured = measure_error(drawn.matrix(8), Uncompressed("bf16"), topology).vnmse
        predicted = predicted_vnmse(Uncompressed("bf16"), topology, 8, spectrum)
        assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("compressor", FORMATS, ids=str)
def test_topologies_in_order(compressor: Compressor) -> None:
    """The fewer roundings, the less error; where sums are exact, none of them matters."""
    ring, butterfly, direct = (
        predicted_vnmse(compressor, topology, 16, PLAIN)
        for topology in (Ring(), Butterfly(), Direct())
    )
    assert ring is not None and butterfly is not None and direct is not None
    if compressor.kind == "thc":
        assert ring == butterfly == direct > 0
    else:
        assert ring > butterfly > direct > 0


def test_nothing_lost() -> None:
    """FP32, and a group of one rank."""
    assert predicted_vnmse(Uncompressed("fp32"), Ring(), 64, PLAIN) == 0.0
    assert predicted_vnmse(DynamiQCompressor(4), Ring(), 1, PLAIN) == 0.0
    assert predicted_vnmse(DynamiQCompressor(4), Hierarchical(ranks_per_node=8), 8, PLAIN) == 0.0


@pytest.mark.parametrize(
    "compressor",
    [
        ErrorFeedback(compressor=DynamiQCompressor(4)),
        MXCompressor(scale_scope="shared"),
        THCCompressor(error_feedback=True),
        DynamiQCompressor(4, drop_energy=0.01),
    ],
    ids=lambda c: c.kind,
)
def test_unknown(compressor: Compressor) -> None:
    assert predicted_vnmse(compressor, Ring(), 8, PLAIN) is None


def test_refused() -> None:
    with pytest.raises(InputError, match="at least one rank, got 0"):
        predicted_vnmse(Uncompressed(), Ring(), 0, PLAIN)
    with pytest.raises(ConfigurationError, match="1024"):
        predicted_vnmse(THCCompressor(bits=20), Ring(), 4096, PLAIN)
    with pytest.raises(ConfigurationError, match="nodes of 3"):
        predicted_vnmse(Uncompressed(), Hierarchical(ranks_per_node=3), 8, PLAIN)


SPECTRA = st.builds(
    lambda slope, correlation, evenness: GradientSpectrum(
        energies=tuple(2.0 ** (-slope * i / 64) for i in range(64)),
        world_size=8,
        correlation=correlation,
        evenness=evenness,
    ),
    st.floats(0, 40),
    st.sampled_from((0.0, 0.02, 0.1, 0.14, 0.3, 0.7, 1.0)),
    st.floats(0.1, 1),
)


@settings(max_examples=40, deadline=None)
@given(
    compressor=st.sampled_from([c for c in FORMATS if c.kind not in {"thc", "omnireduce"}]),
    spectrum=SPECTRA,
    ranks=st.tuples(st.integers(2, 70), st.integers(2, 70)).map(sorted),
)
def test_ranks_on_a_ring(
    compressor: Compressor, spectrum: GradientSpectrum, ranks: list[int]
) -> None:
    """More ranks never make the predicted error smaller where every hop rounds."""
    few, many = (predicted_vnmse(compressor, Ring(), n, spectrum) for n in ranks)
    assert few is not None and many is not None
    assert few <= many * (1 + 1e-12)


@settings(max_examples=30, deadline=None)
@given(
    spectrum=SPECTRA,
    bits=st.tuples(st.floats(1.5, 12), st.floats(1.5, 12)).map(sorted),
    topology=st.sampled_from([Ring(), Butterfly(), Direct()]),
)
def test_bits(spectrum: GradientSpectrum, bits: list[float], topology: Topology) -> None:
    """More bits never make it larger."""
    few, many = (predicted_vnmse(DynamiQCompressor(b), topology, 8, spectrum) for b in bits)
    assert few is not None and many is not None
    assert many <= few


def test_time() -> None:
    """Hundreds of configurations of thousands of ranks take no time once a schedule is known."""
    for topology in (Ring(), Butterfly(), Direct()):
        predicted_vnmse(DynamiQCompressor(4), topology, 4096, PLAIN)
    begin = time.process_time()
    for topology in (Ring(), Butterfly(), Direct()):
        for tenths in range(20, 80):
            predicted_vnmse(DynamiQCompressor(tenths / 10), topology, 4096, PLAIN)
    assert time.process_time() - begin < 0.5
