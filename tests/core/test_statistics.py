"""Statistics: reduced on the main schedule, equal on all ranks, true on long rings."""

from typing import Literal

import pytest
import torch

from dynamiq.core.agreement import HEADER_BYTES
from dynamiq.core.compressor import Compressor, Encoding, Statistics
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.message import Call, Message
from dynamiq.core.statistics import StatisticsEncoding
from dynamiq.topologies import Ring
from tests.contracts.compressor import all_reduce, reduce_scatter, same_bits
from tests.core.formats import every_topology


class OnlyStatistics(Compressor):
    """Sends nothing but its entries as statistics, and gives these as the result."""

    kind: Literal["only-statistics"] = "only-statistics"
    reduction: Literal["sum", "max"] = "sum"
    format: Literal["bf16", "fp32", "bit"] = "fp32"

    def statistics(self, x, layout, call, state):
        return Statistics(x, self.reduction, self.format)

    def encode(self, statistics, layout, schedule, call, state):
        return Reduced(statistics)


class Reduced(Encoding):
    positions = 0

    def __init__(self, values):
        self.values = values

    def payload_bytes(self, message, positions):
        raise AssertionError("there is nothing to send")

    def load(self, x, rank, out):
        return None

    compress = decompress = decompress_accumulate = payload_bytes

    def store(self, work, out, chunk=None):
        out.copy_(self.values if chunk is None else self.values[: out.numel()])


def reduce(x, topology, reduction="sum", format="fp32", **setting):
    compressor = OnlyStatistics(reduction=reduction, format=format)
    outs = all_reduce(compressor, topology, x, **setting).outs
    assert all(same_bits(out, outs[0]) for out in outs), "ranks decide differently"
    return outs[0]


def positive(world_size, count):
    generator = torch.Generator().manual_seed(world_size)
    return torch.rand(world_size, count, generator=generator) + 0.5


@every_topology
@pytest.mark.parametrize("world_size", [2, 3, 7, 8])
@pytest.mark.parametrize("count", [1, 100])
class TestEverySize:
    def test_fp32_sums_of_integers_are_exact(self, topology, world_size, count):
        x = (positive(world_size, count) * 1000).round()

        assert torch.equal(reduce(x, topology), x.sum(0))

    def test_fp32_maxima_are_exact(self, topology, world_size, count):
        x = positive(world_size, count) - 1.0

        assert torch.equal(reduce(x, topology, "max"), x.amax(0))

    def test_bf16_sums_are_bfloat16_values_near_the_sum(self, topology, world_size, count):
        x = positive(world_size, count)
        result = reduce(x, topology, "sum", "bf16")

        assert torch.equal(result.bfloat16().float(), result)
        assert result.allclose(x.sum(0), rtol=2**-7 * world_size)

    def test_a_bit_is_what_any_rank_says(self, topology, world_size, count):
        said = positive(world_size, count) > 1.3
        # Whatever is not 0 is a 1, the least and what is no number, too.
        for value in (1.0, -7.5, 1e-45, torch.nan):
            x = torch.where(said, value, torch.zeros(1))
            result = reduce(x, topology, "max", "bit")
            assert torch.equal(result, said.any(0).float())

    def test_bits_are_sent_as_bits(self, topology, world_size, count):
        """Whole bytes for each chunk: eight bits or the rest of the last one."""
        x = torch.ones(world_size, count)
        compressor = OnlyStatistics(reduction="max", format="bit")
        outcome = all_reduce(compressor, topology, x)
        peers = sum(len(topology.schedule(world_size).peers(r)) for r in range(world_size))
        sent = sum(outcome.bytes_sent) - HEADER_BYTES * peers
        assert sent == 2 * (world_size - 1) * -(-count // 8)

    def test_segments_change_nothing(self, topology, world_size, count):
        x = positive(world_size, count)

        assert same_bits(
            reduce(x, topology, "sum", "bf16", segments=3), reduce(x, topology, "sum", "bf16")
        )


@every_topology
def test_a_maximum_in_bf16_is_exact_for_bfloat16_values(topology):
    x = positive(5, 700).bfloat16().float()

    assert torch.equal(reduce(x, topology, "max", "bf16"), x.amax(0))


@every_topology
@pytest.mark.parametrize("format", ["bf16", "fp32"])
@pytest.mark.parametrize("reduction", ["sum", "max"])
@pytest.mark.parametrize("rank", [0, 2, 4])
def test_nan_and_infinity_propagate_from_any_rank(topology, reduction, format, rank):
    x = positive(5, 40)
    x[rank, 7] = torch.nan
    x[rank, 30] = torch.inf
    result = reduce(x, topology, reduction, format)

    assert result[7].isnan()
    assert result[30] == torch.inf
    assert result.isfinite().sum() == 38


@every_topology
def test_negative_infinity_is_the_identity_of_max(topology):
    x = torch.full((4, 3), -torch.inf)
    x[2, 1] = -5.0

    assert reduce(x, topology, "max").tolist() == [-torch.inf, -5.0, -torch.inf]


@every_topology
def test_no_statistics_cost_nothing(topology):
    outcome = all_reduce(OnlyStatistics(), topology, torch.zeros(3, 0))

    assert outcome.bytes_sent == [16 * len(topology.schedule(3).peers(rank)) for rank in range(3)]


@every_topology
@pytest.mark.parametrize(("format", "size"), [("bf16", 2), ("fp32", 4)])
def test_bytes(topology, format, size):
    outcome = all_reduce(OnlyStatistics(format=format), topology, positive(4, 100))
    headers = [16 * len(topology.schedule(4).peers(rank)) for rank in range(4)]

    assert sum(outcome.bytes_sent) == sum(headers) + 2 * 3 * 100 * size


def test_a_reduce_scatter_reduces_its_statistics_for_all_ranks():
    x = torch.arange(12.0).view(3, 4)
    outs = reduce_scatter(OnlyStatistics(), Ring(), x, (0, 2, 3, 4)).outs

    assert [out.tolist() for out in outs] == [[12.0, 15.0], [12.0], [12.0]]


@every_topology
def test_bf16_sums_are_unbiased(topology):
    """The mean error of many calls vanishes like 1/√calls."""
    x = positive(4, 300)
    exact = x.double().sum(0)
    errors = torch.stack(
        [
            reduce(x, topology, "sum", "bf16", call=Call(0, number)).double() - exact
            for number in range(64)
        ]
    )
    ratio = errors.sum(0).square().sum() / errors.square().sum()

    assert ratio.item() == pytest.approx(1.0, abs=0.35)  # a rounding to nearest gives above 20


@every_topology
def test_calls_and_seeds_round_otherwise(topology):
    x = positive(4, 300)
    results = [
        reduce(x, topology, "sum", "bf16", call=call)
        for call in (Call(0, 0), Call(0, 1), Call(1, 0))
    ]

    assert not torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def sum_along_a_ring(world_size, values):
    """Carry ones along the whole ring, through the messages of chunk 0."""
    encoding = StatisticsEncoding(
        Statistics(torch.ones(values * world_size), "sum", "bf16"), world_size, Call()
    )
    positions = range(encoding.positions)
    ones = torch.ones(values * world_size)
    work = encoding.load(ones, 0, ones)
    for rank in range(1, world_size):
        message = Message(chunk=0, sender=rank, summed=rank, hop=rank - 1)
        payload = torch.empty(encoding.payload_bytes(message, positions), dtype=torch.uint8)
        encoding.compress(work, message, positions, payload)
        work[0] = 1.0  # what the next rank has
        encoding.decompress_accumulate(payload, work, message, positions)
    return work[0, :values]


def test_a_ring_of_512_ranks_does_not_stagnate():
    """Rounded to nearest, BF16 sums of ones stop at 256."""
    result = sum_along_a_ring(512, 1000)

    assert result.mean().item() == pytest.approx(512, rel=0.004)
    assert result.std().item() < 0.05 * 512


@pytest.mark.soak
def test_512_ranks_in_lockstep_do_not_stagnate():
    result = reduce(torch.ones(512, 512), Ring(), "sum", "bf16")

    assert result.mean().item() == pytest.approx(512, rel=0.003)


@every_topology
def test_segments_of_bits(topology):
    """Cut at whole bytes."""
    x = (positive(3, 1000) > 1.4).float()
    assert same_bits(
        reduce(x, topology, "max", "bit", segments=7), reduce(x, topology, "max", "bit")
    )


def test_bits_have_no_sum():
    with pytest.raises(ConfigurationError, match="one bit each have no sum"):
        Statistics(torch.ones(3), "sum", "bit")
