"""What operations cost: the fit, and that every format's operations can be done by one rank."""

import time

import pytest
import torch

from dynamiq import LoopbackTransport
from dynamiq.core.compressor import State
from dynamiq.probe.clock import Clock
from dynamiq.probe.codecs import candidates, fit, gradient
from dynamiq.probe.operations import PER_CALL, PER_MESSAGE, STATISTICS_MESSAGE, RankAlone
from dynamiq.probe.together import Together
from dynamiq.topologies import Ring

N, MESSAGE = 4, 4096


@pytest.fixture
def together():
    (transport,) = LoopbackTransport.world(1)
    transport.connect(b"")
    return Together(transport, torch.device("cpu"))


@pytest.mark.parametrize("compressor", candidates(), ids=lambda c: c.kind)
def test_one_rank_does_all_operations(compressor, together):
    clock = Clock(together, None)
    alone = RankAlone(compressor, Ring().schedule(N), 1, clock)
    x, state = gradient(N * MESSAGE, seed=0), State()
    out = x.clone()
    for number in range(2):
        state = alone.call(x, out, number, state)

    counts = {name: len(seconds) for name, seconds in clock.seconds.items()}
    per_message = {"compress": 1, "accumulate": N - 1, "recompress": N - 1, "decompress": N}
    has_statistics = compressor.kind in ("dynamiq", "thc", "omnireduce")
    assert counts.pop(STATISTICS_MESSAGE, 0) == 2 * has_statistics * sum(per_message.values())
    assert (clock.entries.pop(STATISTICS_MESSAGE, 0) > 0) == has_statistics
    assert counts == {name: 2 * per_message.get(name, 1) for name in (*PER_CALL, *PER_MESSAGE)}
    assert all(clock.entries[name] == N * MESSAGE for name in PER_CALL)
    assert all(clock.entries[name] == MESSAGE for name in PER_MESSAGE)
    assert out.isfinite().all()
    assert not torch.equal(out, x)


def test_candidates_are_told_apart():
    made = candidates()
    assert len({c.digest() for c in made}) == len(made)


def test_seconds_are_those_that_pass_or_those_of_the_processor(together):
    alone, sharing = Clock(together, 2.0), Clock(together, 0.5)
    for clock in (alone, sharing):
        with clock.time("sleep", 1):
            time.sleep(0.05)
    assert alone.seconds["sleep"][0] >= 0.05
    assert sharing.seconds["sleep"][0] < 0.04

    with sharing.time("work", 1):
        began = time.process_time()
        while time.process_time() - began < 0.02:
            pass
    assert sharing.seconds["work"][0] >= 0.04


def test_fit_finds_a_line():
    cost = fit([(n, 2e-5 + n * 3e-9) for n in (1000, 10_000, 1_000_000)])
    assert cost.fixed_s == pytest.approx(2e-5)
    assert cost.entry_s == pytest.approx(3e-9)


def test_fit_weighs_relative_errors():
    cost = fit([(100, 1.1e-5), (10_000, 1.1e-4), (1_000_000, 3e-2)])
    assert cost.fixed_s == pytest.approx(1e-5, rel=0.2)
    assert 1e-8 < cost.entry_s < 3e-8


@pytest.mark.parametrize(
    ("points", "fixed_s", "entry_s"),
    [
        ([(10, 1.0), (100, 20.0)], 0.0, None),  # superlinear: no negative constant
        ([(10, 2.0), (100, 1.0)], None, 0.0),  # falling
        ([(7, 3.0), (7, 3.0)], 3.0, 0.0),
        ([(0, 0.0), (0, 0.0)], 0.0, 0.0),
    ],
)
def test_costs_are_never_negative(points, fixed_s, entry_s):
    cost = fit(points)
    assert fixed_s is None or cost.fixed_s == pytest.approx(fixed_s)
    assert entry_s is None or cost.entry_s == entry_s
    assert cost.fixed_s > 0 or cost.entry_s > 0 or points[0][1] == 0
