"""A row's figures against each of them computed another way."""

import statistics
from typing import Literal

import pytest
import torch

from dynamiq.compressors import DynamiQCompressor, Uncompressed
from dynamiq.compressors.uncompressed import UncompressedEncoding
from dynamiq.core.metrics import measure_error
from dynamiq.simulation.measurement import Case, Effort, measure
from dynamiq.simulation.one_chunk import OneChunk
from dynamiq.simulation.sources import mixture
from dynamiq.simulation.worlds import AllChunks, Attempt
from dynamiq.topologies import Butterfly, Ring
from tests.contracts.compressor import same_bits, sample
from tests.probes import AdaptiveFixedPoint

STOCHASTIC = DynamiQCompressor.paper(5.0, rounding="stochastic")


class Forecast(Uncompressed):
    """BF16 that claims to have widths and to know its error."""

    kind: Literal["forecast"] = "forecast"

    def unit(self, numel, world_size):
        return 256

    def encode(self, statistics, layout, schedule, call, state):
        return ForecastEncoding(layout, call, torch.bfloat16)


class ForecastEncoding(UncompressedEncoding):
    predicted_vnmse = 0.25

    def widths_of_hop(self, hop):
        widths = torch.zeros(4, 2, 3, dtype=torch.int64)  # room for 24 supergroups
        widths[:, 0] = hop + 1
        return widths


@pytest.fixture(scope="module")
def x():
    return sample(4, 10 * 256 - 6)


@pytest.fixture(scope="module")
def row(x):
    return measure(AllChunks(x), Case("mine", STOCHASTIC, Butterfly(), 5.0), Effort(seeds=4))


def test_says_what_was_simulated(row, x):
    assert (row.compressor, row.topology, row.world_size) == ("mine", "butterfly", 4)
    assert (row.entries, row.one_chunk, row.bit_budget, row.seeds) == (2554, False, 5.0, 4)
    assert row.description == STOCHASTIC.to_dict()
    assert row.as_dict()["hops"][0] == vars(row.hops[0])


def test_error_and_bits_are_those_of_real_calls(row, x):
    reports = [measure_error(x, STOCHASTIC, Butterfly(), seed=seed) for seed in range(4)]
    errors = [report.vnmse for report in reports]
    assert row.vnmse == pytest.approx(statistics.fmean(errors), rel=1e-9)
    assert row.vnmse_spread == pytest.approx(statistics.pstdev(errors), rel=1e-6)
    assert row.bits_per_entry == reports[0].bits_per_entry
    assert row.bytes_per_rank == statistics.fmean(reports[0].bytes_sent)


def test_bias_and_weighted_error_are_those_of_the_results(row, x):
    exact, square = x.double().sum(0), x.double().square().mean(0)
    results = [measure_error(x, STOCHASTIC, Butterfly(), seed=s).result for s in range(4)]
    errors = [result.double() - exact for result in results]
    weighted = [(e.square() / square).sum() / (exact.square() / square).sum() for e in errors]
    mean = torch.stack(errors).mean(0).square().sum()
    power = torch.stack([e.square().sum() for e in errors]).mean()

    assert row.weighted_error == pytest.approx(torch.stack(weighted).mean().item(), rel=1e-9)
    assert row.bias == pytest.approx(((4 * mean / power - 1) / 3).item(), abs=1e-9)
    assert 0 < row.bias_error < 0.1


def test_hops_are_those_of_the_topology(row):
    assert [(hop.summed, hop.transfers, hop.reduce) for hop in row.hops] == [
        (hop.summed, hop.transfers, hop.reduce) for hop in Butterfly().hops(4)
    ]
    assert all(hop.added > 0 for hop in row.hops)
    assert sum(hop.added for hop in row.hops) == pytest.approx(row.vnmse, rel=0.25)


def test_nearest_rounding_is_all_bias(x):
    row = measure(AllChunks(x), Case("bf16", Uncompressed("bf16"), Ring(), None), Effort(seeds=3))
    assert row.bias == pytest.approx(1.0)
    assert (row.vnmse_spread, row.predicted_vnmse) == (0.0, None)
    assert [hop.mean_width for hop in row.hops] == [None] * 4
    assert [hop.payload_bits for hop in row.hops] == [16.0] * 4


def test_widths_and_prediction_are_read_from_the_encoding(x):
    row = measure(AllChunks(x), Case("f", Forecast("bf16"), Ring(), None), Effort(seeds=1))
    assert row.vnmse_spread is None
    assert row.predicted_vnmse == 0.25
    assert [hop.mean_width for hop in row.hops] == pytest.approx([1.2, 2.4, 3.6, 4.8])
    assert (row.bias, row.bias_error) == (None, None)


def test_hops_are_left_out_on_request(x):
    effort = Effort(seeds=1, hops=False)
    row = measure(AllChunks(x), Case("f", Forecast("bf16"), Ring(), None), effort)
    assert (row.hops, row.predicted_vnmse) == ((), 0.25)


@pytest.mark.parametrize("warm_up_calls", [0, 1, 2])
def test_formats_that_learn_are_warmed_up(x, warm_up_calls):
    """Small entries: two bytes each in the first call, then one."""
    x = x / x.abs().max() / 2
    effort = Effort(seeds=2, warm_up_calls=warm_up_calls, hops=False)
    row = measure(AllChunks(x), Case("a", AdaptiveFixedPoint(), Ring(), None), effort)
    report = measure_error(x, AdaptiveFixedPoint(), Ring(), warm_up_calls=warm_up_calls)

    assert row.bits_per_entry == pytest.approx(8 if warm_up_calls else 16, rel=0.01)
    trial = AllChunks(x).run(AdaptiveFixedPoint(), Ring(), Attempt(0, warm_up_calls))
    assert same_bits(trial.estimate, report.result)


def test_formats_that_do_not_learn_are_not_warmed_up(x):
    trials = [AllChunks(x).run(STOCHASTIC, Ring(), Attempt(0, calls)) for calls in (0, 2)]
    assert same_bits(*[trial.estimate for trial in trials])


def test_one_chunk_is_measured_alike():
    world = OneChunk(mixture(256 * 64, seed=2), 6)
    row = measure(world, Case("mine", STOCHASTIC, Ring(), 5.0), Effort(seeds=3))

    assert (row.one_chunk, row.entries, row.world_size) == (True, 256 * 64, 6)
    assert sum(hop.added for hop in row.hops) == pytest.approx(row.vnmse, rel=0.25)
    assert row.bytes_per_rank == pytest.approx(2 * 5 * row.bits_per_entry * row.entries / 8)
    assert abs(row.bias) < 0.2


def test_orders_of_the_ranks_are_averaged_over(x):
    """Each as if the file had its ranks so; the first is the file's."""
    case = Case("mine", STOCHASTIC, Ring(), 5.0)
    row = measure(AllChunks(x), case, Effort(seeds=2, hops=False, orders=3))
    alone = []
    for order in range(3):
        generator = torch.Generator().manual_seed(order)
        ranks = torch.randperm(len(x), generator=generator) if order else torch.arange(len(x))
        world = AllChunks(x[ranks].contiguous())
        alone.append(measure(world, case, Effort(seeds=2, hops=False)).vnmse)
    assert row.orders == 3
    assert len(set(alone)) == 3
    assert row.vnmse == pytest.approx(statistics.fmean(alone), rel=1e-6)
    assert row.order_spread == pytest.approx(statistics.pstdev(alone), rel=1e-6)
