"""Bytes of a plan are those that pipelines send, to the byte, on every rank."""

import threading

import pytest
import torch

from dynamiq import (
    Butterfly,
    Direct,
    DynamiQCompressor,
    ErrorFeedback,
    Hierarchical,
    LoopbackTransport,
    MXCompressor,
    OmniReduceCompressor,
    Pipeline,
    Ring,
    THCCompressor,
    Uncompressed,
)
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.segments import segment_count
from dynamiq.planner.cost.buckets import fill
from dynamiq.planner.cost.model import Configuration, Model
from dynamiq.planner.cost.stages import Request
from tests.planner.clusters import cluster, training

FORMATS = {
    "fp32": Uncompressed("fp32"),
    "bf16": Uncompressed("bf16"),
    "mxfp8": MXCompressor(),
    "mxfp4-shared": MXCompressor("mxfp4_e2m1", scale_scope="shared"),
    "default": DynamiQCompressor(5),
    "paper": DynamiQCompressor.paper(4),
    "thc": THCCompressor(),
    "feedback": ErrorFeedback(DynamiQCompressor.local(3.5)),
}
TOPOLOGIES = {
    "ring": Ring(),
    "butterfly": Butterfly(),
    "direct": Direct(),
    "hierarchical": Hierarchical(ranks_per_node=2, local=MXCompressor(), inter=Butterfly()),
}


def sent(ranks, settings, calls):
    """Return what each rank has sent after a list of calls of so many entries."""
    counts = [0] * ranks

    def run(rank, transport):
        with Pipeline(transport=transport, **settings) as pipeline:
            for number, numel in enumerate(calls):
                x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
                pipeline.all_reduce(x, key=str(number))
            counts[rank] = pipeline.metrics().bytes_sent

    threads = [
        threading.Thread(target=run, args=pair)
        for pair in enumerate(LoopbackTransport.world(ranks))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=list(TOPOLOGIES))
@pytest.mark.parametrize("compressor", FORMATS.values(), ids=list(FORMATS))
def test_a_call_sends_what_its_shape_says(compressor, topology):
    ranks, numel, segments = 6, 20_011, 3
    settings = {"compressor": compressor, "topology": topology, "min_numel": 0}
    expected = [
        Request(compressor, topology.schedule(ranks), numel, 4, rank).shape().bytes_sent(segments)
        for rank in range(ranks)
    ]
    assert sent(ranks, {**settings, "segments": segments}, [numel]) == expected


def test_a_step_sends_its_buckets_small_ones_uncompressed():
    numels = [300_000, 150_000, 900_000, 20_000]
    work = training(*((numel, 0.1) for numel in numels))
    configuration = Configuration(compressor=DynamiQCompressor(4), topology=Ring(), bucket_cap_mb=1)
    model = Model(cluster(3), work)
    buckets = [bucket.numel for bucket in fill(work, 1)]
    assert buckets == [300_000, 1_050_000, 20_000]
    settings = {"compressor": configuration.compressor, "topology": configuration.topology}
    found = sent(3, settings, buckets)
    assert found == [model.bytes_sent(configuration, rank) for rank in range(3)]
    uncompressed = Configuration(compressor=Uncompressed("fp32"), topology=Ring())
    assert model.bytes_sent(uncompressed) > 4 * found[0] > 0


def test_large_buckets_have_the_pipelines_segments():
    numel = 5 << 19
    assert segment_count(Ring().schedule(2), numel, on_cpu=True) == 2
    model = Model(cluster(2), training((numel, 0.1)))
    configuration = Configuration(compressor=THCCompressor(bits=5), topology=Ring())
    whole = configuration.model_copy(update={"segments": 1})
    settings = {"compressor": configuration.compressor, "topology": configuration.topology}
    assert sent(2, settings, [numel])[0] == model.bytes_sent(configuration)
    assert sent(2, {**settings, "segments": 1}, [numel])[0] == model.bytes_sent(whole)


def test_sizes_that_depend_on_the_data_are_refused():
    schedule = Ring().schedule(2)
    with pytest.raises(ConfigurationError, match="nobody knows it before the data"):
        Request(OmniReduceCompressor(), schedule, 1000).shape().bytes_sent(1)
