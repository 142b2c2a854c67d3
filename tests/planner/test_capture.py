"""Spectra of a training's own gradients: the same on all ranks, and those of what was reduced."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamiq import DynamiQCompressor, GlooTransport, InputError, Pipeline, Ring, Uncompressed
from dynamiq.planner.errors.observation import spectrum_of
from dynamiq.simulation.sources import Drawn
from tests.integrations.worlds import rank_of, run_world, same
from tests.processes import run_ranks

GRADIENTS = Drawn(2.0 ** -(torch.arange(200) / 10), 0.2).matrix(3)
FORMATS = [Uncompressed(), DynamiQCompressor(4)]


def reduced(capture, calls=2, **options):
    """Return what a rank does: reduce its gradients, then say what it has captured."""

    def run(pipeline):
        results = []
        for call in range(calls):
            results.append(GRADIENTS[rank_of(pipeline)].clone())
            options_of_call = {"key": "w", "async_op": call % 2 == 1}
            handle = pipeline.all_reduce(results[-1], **options_of_call)
            if handle is not None:
                handle.wait()
        pipeline.close()
        return results, pipeline.spectrum() if capture else None, pipeline.metrics()

    return run_world(run, 3, capture=capture, min_numel=0, **options)


@pytest.mark.parametrize("compressor", FORMATS, ids=lambda c: c.kind)
def test_spectrum_of_what_was_reduced(compressor):
    expected = spectrum_of(GRADIENTS)
    spectra = [spectrum for _, spectrum, _ in reduced(2, compressor=compressor)]
    assert spectra[0] == spectra[1] == spectra[2]
    found = spectra[0]
    assert found.energies == pytest.approx(expected.energies, rel=1e-9)
    assert found.correlation == pytest.approx(expected.correlation, abs=2e-3)
    assert [band.rotated for band in found.bands] == [band.rotated for band in expected.bands]
    assert found.peaks == pytest.approx(expected.peaks)
    assert found.evenness == pytest.approx(expected.evenness)
    assert found.world_size == 3


def test_cost():
    """Results and counts are those of a pipeline that captures nothing; bytes are few."""
    ((plain, _, without), *_) = reduced(None, calls=1, compressor=Uncompressed())
    ((results, _, metrics), *_) = reduced(1, calls=1, compressor=Uncompressed())
    assert same(results, plain[0])
    assert metrics.calls == without.calls == 1
    assert metrics.bits_per_entry == without.bits_per_entry
    assert without.bytes_sent < metrics.bytes_sent < 1.1 * without.bytes_sent


def test_only_the_first_calls_are_captured():
    (_, _, few), *_ = reduced(1, calls=1, compressor=Uncompressed())
    (_, _, many), *_ = reduced(1, calls=3, compressor=Uncompressed())
    (_, _, none), *_ = reduced(None, calls=2, compressor=Uncompressed())
    assert many.bytes_sent == few.bytes_sent + none.bytes_sent


def test_nothing_captured():
    def run(pipeline):
        with pytest.raises(InputError, match=r"capture=20"):
            pipeline.spectrum()

    run_world(run, 2)

    def zeros(pipeline):
        pipeline.all_reduce(torch.zeros(1000), key="w")
        pipeline.all_reduce(torch.full((1000,), torch.nan), key="w")
        with pytest.raises(InputError, match="no gradient was captured"):
            pipeline.spectrum()
        pipeline.all_reduce(torch.ones(1000), key="w")
        return pipeline.spectrum()

    first, second = run_world(zeros, 2, capture=3, min_numel=0)
    assert first == second
    assert first.correlation == 1.0


def train(rank, start_step):
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    options = {"min_numel": 0, "start_step": start_step, "capture": 3}
    with Pipeline(DynamiQCompressor(4), Ring(), GlooTransport(), **options) as pipeline:
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
        ddp.register_comm_hook(None, pipeline.ddp_hook)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            ddp(torch.randn(16, 64, generator=generator)).square().sum().backward()
            ddp.zero_grad()
        return pipeline.spectrum(), pipeline.metrics()


def test_ddp():
    """Several buckets, steps without and with compression."""
    (first, metrics), (second, _) = run_ranks(train, 2, 2)
    assert first == second
    assert 0 < metrics.compressed_calls < metrics.calls
    assert metrics.calls > 4, "several buckets"
    assert len(first.energies) > 64
    assert 0 < first.correlation < 1
