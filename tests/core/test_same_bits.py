"""The big matrix: every format, topology, world size and size ends with equal bits on all ranks."""

import pytest
import torch

from dynamiq.core.collective import Collective
from dynamiq.core.drivers import lockstep
from dynamiq.core.hierarchy import on_levels
from dynamiq.core.message import Call
from dynamiq.core.metrics import vnmse
from dynamiq.topologies import Butterfly, Ring
from tests.contracts.compressor import same_bits, sample
from tests.core.formats import IN_FEW, every_schedule, few_schedules, formats

WORLD_SIZES = range(1, 10)
SIZES = (0, 1, 15, 16, 17, 255, 256, 257, 4097)
LARGE = 100_003


def check(format, topology, world_size, numel):
    x = sample(world_size, numel, seed=numel)
    schedule = topology.schedule(world_size)
    outs = [torch.full((numel,), torch.nan) for _ in range(world_size)]
    call = Call(seed=1, number=numel)
    parts = [
        on_levels(Collective(format.compressor, schedule, rank, numel, call))
        for rank in range(world_size)
    ]
    lockstep([part.run(x[part.rank], outs[part.rank]) for part in parts])
    assert all(same_bits(out, outs[0]) for out in outs), f"ranks differ at {numel} entries"
    assert outs[0].isfinite().all()
    if numel > 4096:
        assert vnmse(outs[0], x.double().sum(0)) < 0.5, "ranks agree on something else"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_schedule
@formats()
def test_small_sizes(format, topology, world_size):
    for numel in SIZES:
        check(format, topology, world_size, numel)


@pytest.mark.parametrize("world_size", [2, 4, 9])
@few_schedules
@formats(lambda f: f.name in IN_FEW)
def test_small_sizes_of_some_formats(format, topology, world_size):
    for numel in SIZES:
        check(format, topology, world_size, numel)


@pytest.mark.parametrize("world_size", [2, 7])
@formats()
def test_a_large_size(format, world_size):
    topology = Ring() if world_size == 2 else Butterfly()

    check(format, topology, world_size, LARGE)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@every_schedule
@formats()
def test_the_large_size_everywhere(format, topology, world_size):
    check(format, topology, world_size, LARGE)
