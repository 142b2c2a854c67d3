"""The interfaces hold for formats that do not exist yet: what is special about each probe works."""

from itertools import pairwise

import pytest
import torch

from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core.collective import Collective
from dynamiq.core.compressor import State
from dynamiq.core.errors import InputError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.topologies import Butterfly, Ring
from tests.contracts.compressor import (
    all_reduce,
    assert_same,
    reduce_scatter,
    same_bits,
    sample,
    uneven_bounds,
)
from tests.core.formats import formats
from tests.probes import (
    AdaptiveFixedPoint,
    FloatPerHop,
    NonZeroBlocks,
    RotatedIntegers,
)
from tests.probes.integers import hadamard

every_topology = pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)


@pytest.mark.parametrize("world_size", range(1, 10))
@every_topology
@formats(lambda f: f.name.startswith(("probe", "feedback")))
def test_every_rank_gets_its_slice(format, topology, world_size):
    """Of slices of very different sizes; all-reduces of all world sizes are in the big matrix."""
    x = sample(world_size, 200)
    bounds = uneven_bounds(200, world_size)
    outs = reduce_scatter(format.compressor, topology, x, bounds).outs
    exact = x.double().sum(0)

    assert [out.numel() for out in outs] == [hi - lo for lo, hi in pairwise(bounds)]
    assert (torch.cat(outs).double() - exact).norm() <= 0.5 * exact.norm()


@pytest.mark.parametrize(("world_size", "slice_numel"), [(2, 36), (4, 22), (3, 700)])
@every_topology
@formats(lambda f: f.name.startswith(("probe", "feedback")))
def test_slices_as_fsdp_asks_for_them(format, topology, world_size, slice_numel):
    """72 entries for two ranks, 88 for four, 700 a rank: in one segment and in five."""
    x = sample(world_size, world_size * slice_numel)
    bounds = tuple(slice_numel * r for r in range(world_size + 1))
    outcome = reduce_scatter(format.compressor, topology, x, bounds)
    exact = x.double().sum(0)

    assert [out.numel() for out in outcome.outs] == [slice_numel] * world_size
    assert (torch.cat(outcome.outs).double() - exact).norm() <= 0.5 * exact.norm()
    segmented = reduce_scatter(format.compressor, topology, x, bounds, segments=5)
    assert_same(outcome, segmented, payloads=False)


def test_a_reduce_scatter_needs_bounds():
    with pytest.raises(InputError, match="needs the bounds"):
        Collective(Uncompressed(), Ring().schedule(2), 0, 10, Call(gather=False))


class TestRotatedIntegers:
    def test_transform_is_orthonormal_and_its_own_inverse(self):
        matrix = torch.stack([hadamard(row) for row in torch.eye(64)])

        assert torch.allclose(matrix @ matrix.T, torch.eye(64), atol=1e-6)
        assert torch.equal(matrix, matrix.T)

    @pytest.mark.parametrize(("summed", "width"), [(1, 1), (2, 2), (4, 2), (400, 3)])
    def test_width_depends_on_how_many_ranks_are_summed(self, summed, width):
        """2 · 100 · 1 fits one byte; two ranks need two, 400 need three."""
        layout, schedule = Layout(64, 2), Ring().schedule(2)
        encoding = RotatedIntegers().encode(torch.ones(1), layout, schedule, Call(), State())

        message = Message(chunk=0, sender=0, summed=summed, hop=0)
        assert encoding.payload_bytes(message, range(32)) == 32 * width

    @every_topology
    def test_messages_of_one_chunk_differ_in_size(self, topology):
        payloads = all_reduce(RotatedIntegers(), topology, sample(4, 1024)).payloads

        sizes = {m.summed: len(payload) for (m, _), payload in payloads.items()}
        assert sizes[1] == 256
        assert {size for summed, size in sizes.items() if summed > 1} == {512}

    def test_all_topologies_give_the_same_bits(self):
        """Integers are added without rounding: the order does not matter."""
        x = sample(7, 1000)

        assert same_bits(
            all_reduce(RotatedIntegers(), Ring(), x).outs[0],
            all_reduce(RotatedIntegers(), Butterfly(), x).outs[0],
        )


class TestNonZeroBlocks:
    @every_topology
    @pytest.mark.parametrize("world_size", [2, 3, 8])
    def test_equals_uncompressed_bit_for_bit(self, topology, world_size):
        x = sample(world_size, 1001)
        x[:, 200:900] = 0.0
        x[-1, 555] = 1.0

        sparse, dense = (
            all_reduce(compressor, topology, x).outs[0]
            for compressor in (NonZeroBlocks(block=1), Uncompressed("fp32"))
        )
        assert torch.equal(sparse, dense)

    @every_topology
    def test_sends_the_union_of_blocks_and_nothing_else(self, topology):
        x = torch.zeros(4, 800)
        x[0, 3] = 1.0
        x[2, 3] = 1.0
        x[1, 9] = torch.nan
        x[3, 799] = 1e-45
        outcome = all_reduce(NonZeroBlocks(), topology, x)

        sent = {m.chunk: len(payload) // 32 for (m, _), payload in outcome.payloads.items()}
        assert sent == {0: 2, 1: 0, 2: 0, 3: 1}
        assert outcome.outs[0][3] == 2.0
        assert outcome.outs[0][9].isnan()
        assert outcome.outs[0][799] == x[3, 799]

    @every_topology
    def test_sends_nothing_when_all_is_zero(self, topology):
        outcome = all_reduce(NonZeroBlocks(), topology, torch.zeros(4, 800))

        assert outcome.payloads == {}


@every_topology
def test_sizes_follow_the_hop(topology):
    outcome = all_reduce(FloatPerHop(), topology, sample(8, 800))
    sizes = {"bf16": 2, "fp32": 4, "fp8": 1}
    formats = FloatPerHop().formats

    assert len({len(payload) for payload in outcome.payloads.values()}) == 3
    for (message, _), payload in outcome.payloads.items():
        assert len(payload) == 100 * sizes[formats[message.hop % 3]]


class TestAdaptiveFixedPoint:
    @every_topology
    def test_sizes_follow_the_call_before(self, topology):
        states = None
        sizes = []
        for number, scale in enumerate([0.1, 100.0, 2.0, 0.1]):
            x = torch.full((3, 30), scale)
            outcome = all_reduce(
                AdaptiveFixedPoint(), topology, x, call=Call(0, number), states=states
            )
            states = outcome.states
            sizes += {len(payload) // 10 for payload in outcome.payloads.values()}

        assert sizes == [2, 1, 3, 2]
        assert [state.shared["bytes"].item() for state in states] == [1, 1, 1]
