"""vNMSE, bits per entry, and the simulated call that measures both."""

import math

import pytest
import torch

from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.core.message import Call
from dynamiq.core.metrics import measure_error, vnmse
from dynamiq.topologies import Butterfly, Ring
from tests.contracts.compressor import all_reduce, same_bits, sample
from tests.core.formats import formats
from tests.probes import NonZeroBlocks

every_topology = pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)


class TestVnmse:
    def test_is_the_squared_error_over_the_squared_norm(self):
        assert vnmse(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 5.0])) == 1 / 34

    def test_of_an_exact_estimate_is_zero(self):
        assert vnmse(sample()[0], sample()[0]) == 0.0

    def test_of_zeros(self):
        zeros = torch.zeros(3)

        assert vnmse(zeros, zeros) == 0.0
        assert vnmse(zeros[:0], zeros[:0]) == 0.0
        assert vnmse(torch.ones(3), zeros) == math.inf
        assert vnmse(zeros, torch.ones(3)) == 1.0

    def test_is_computed_in_float64(self):
        exact = torch.tensor([1e30, 1e-30])

        assert vnmse(exact * (1 + 2**-20), exact) == pytest.approx(2.0**-40, rel=1e-3)
        assert vnmse(exact.half(), exact) == math.inf

    def test_of_a_non_finite_estimate_is_not_a_small_number(self):
        assert math.isnan(vnmse(torch.tensor([math.nan, 1.0]), torch.ones(2)))
        assert vnmse(torch.tensor([math.inf, 1.0]), torch.ones(2)) == math.inf

    def test_takes_narrow_types(self):
        assert vnmse(torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).half()) == 0.25


@every_topology
@pytest.mark.parametrize("world_size", [2, 3, 8, 9])
class TestBitsPerEntry:
    @pytest.mark.parametrize("numel", [1, 7, 100, 1001])
    @pytest.mark.parametrize(("format", "bits"), [("bf16", 16), ("fp32", 32), ("fp64", 64)])
    def test_uncompressed_entries_have_the_width_of_their_dtype(
        self, topology, world_size, numel, format, bits
    ):
        report = measure_error(sample(world_size, numel), Uncompressed(format), topology)

        assert report.bits_per_entry == pytest.approx(bits, rel=1e-12)

    def test_statistics_count_and_padding_is_paid_for(self, topology, world_size):
        """FP32 blocks of 8 and one BF16 for each: 34 bits per padded entry."""
        report = measure_error(sample(world_size, 8 * 216 - 3), NonZeroBlocks(), topology)

        assert report.bits_per_entry == pytest.approx(34, rel=1e-12)

    def test_headers_are_sent_but_not_counted(self, topology, world_size):
        report = measure_error(sample(world_size, 1000), Uncompressed("bf16"), topology)
        schedule = topology.schedule(world_size)
        headers = sum(16 * len(schedule.peers(rank)) for rank in range(world_size))

        assert len(report.bytes_sent) == world_size
        assert sum(report.bytes_sent) == headers + 2 * (world_size - 1) * 1000 * 2


class TestMeasureError:
    @formats()
    @every_topology
    def test_is_a_real_call(self, format, topology):
        x = sample(3, 700)
        report = measure_error(x, format.compressor, topology, seed=4, call=2)
        outcome = all_reduce(format.compressor, topology, x, call=Call(4, 2))

        assert same_bits(report.result, outcome.outs[0])
        assert list(report.bytes_sent) == outcome.bytes_sent
        assert report.vnmse == vnmse(report.result, x.double().sum(0))

    def test_on_real_gradients(self, gradients):
        report = measure_error(gradients[:, :20_000], Uncompressed("bf16"), Butterfly())

        assert gradients.shape[0] == 8
        assert 1e-7 < report.vnmse < 1e-4

    def test_leaves_gradients_alone(self):
        x = sample()
        before = x.clone()
        measure_error(x, Uncompressed("fp16"), Ring())

        assert same_bits(x, before)

    def test_runs_without_a_graph(self):
        report = measure_error(sample().requires_grad_(), Uncompressed(), Ring())

        assert not report.result.requires_grad

    def test_of_one_rank_is_exact_and_free(self):
        report = measure_error(sample(1, 10), Uncompressed("fp16"), Ring())

        assert (report.vnmse, report.bits_per_entry, report.bytes_sent) == (0.0, 0.0, (0,))

    @every_topology
    def test_of_nothing_is_nothing(self, topology):
        report = measure_error(torch.zeros(4, 0), Uncompressed(), topology)

        assert (report.vnmse, report.bits_per_entry) == (0.0, 0.0)
        assert report.result.shape == (0,)

    @pytest.mark.parametrize(
        "gradients",
        [
            torch.zeros(8),
            torch.zeros(2, 3, 4),
            torch.zeros(2, 3).long(),
            torch.zeros(2, 3).cfloat(),
            torch.zeros(2, 3).to_sparse(),
        ],
        ids=lambda t: f"{t.layout}-{t.dtype}{list(t.shape)}",
    )
    def test_what_is_not_a_matrix_of_floats_is_refused(self, gradients):
        with pytest.raises(InputError, match=r"floating-point tensor \[ranks, entries\]"):
            measure_error(gradients, Uncompressed(), Ring())

    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            (([[1.0]], Uncompressed(), Ring()), r"tensor \[ranks, entries\], got a list"),
            ((torch.zeros(2, 5), "paper", Ring()), "takes a Compressor, got 'paper'"),
            ((torch.zeros(2, 5), Uncompressed(), "ring"), "takes a Topology, got 'ring'"),
        ],
    )
    def test_what_is_no_part_of_a_simulation_is_refused(self, arguments, complaint):
        with pytest.raises(InputError, match=complaint):
            measure_error(*arguments)

    def test_of_no_ranks_is_refused(self):
        with pytest.raises(ConfigurationError, match="at least one rank"):
            measure_error(torch.zeros(0, 5), Uncompressed(), Ring())
