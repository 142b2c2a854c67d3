"""OmniReduce: which blocks are sent, what arrives, and how the number of votes settles."""

from itertools import pairwise

import pytest
import torch

from dynamiq import (
    Butterfly,
    ConfigurationError,
    Direct,
    ErrorFeedback,
    OmniReduceCompressor,
    Ring,
    Uncompressed,
    vnmse,
)
from dynamiq.core.agreement import HEADER_BYTES
from dynamiq.core.message import Call
from dynamiq.core.metrics import simulate
from tests.contracts.compressor import (
    all_reduce,
    assert_same,
    reduce_scatter,
    same_bits,
    sample,
    uneven_bounds,
)
from tests.integrations.worlds import rank_of, run_world

BLOCK = 256
LOSSLESS = OmniReduceCompressor(payload="fp32")

every_topology = pytest.mark.parametrize(
    "topology", [Ring(), Butterfly(), Direct()], ids=lambda t: t.kind
)


def top(bit_budget=5.0, payload="fp32"):
    return OmniReduceCompressor(mode="topk", bit_budget=bit_budget, payload=payload)


def integers(world_size, numel, blocks):
    """Return float32[n, d] of small integers in some blocks only, each on some ranks only."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randint(-50, 50, (world_size, numel), generator=generator).float()
    keep = torch.zeros(world_size, -(-numel // BLOCK), dtype=torch.bool)
    for i, block in enumerate(blocks):
        keep[i % world_size, block] = True
        keep[(3 * i + 1) % world_size, block] = True
    return x * keep.repeat_interleave(BLOCK, 1)[:, :numel]


def payload_bytes(outcome):
    """Return the bytes of each chunk's payload: the same at all hops."""
    sizes = {}
    for (message, _), payload in outcome.payloads.items():
        assert sizes.setdefault(message.chunk, len(payload)) == len(payload)
    return sizes


def strongest(x, count, bounds=None):
    """Return a rank's blocks of the largest norms, as (start, stop): plainly, one by one."""
    bounds = bounds or (0, len(x))
    blocks = [
        (start, min(start + BLOCK, stop))
        for lo, stop in pairwise(bounds)
        for start in range(lo, stop, BLOCK)
    ]
    norms = [x[start:stop].double().norm().item() for start, stop in blocks]
    order = sorted(range(len(blocks)), key=lambda i: (-norms[i], i))
    return {blocks[i] for i in order[:count] if norms[i] > 0}


class TestLossless:
    @every_topology
    @pytest.mark.parametrize("world_size", range(2, 10))
    @pytest.mark.parametrize("op", ["sum", "mean"])
    def test_sums_and_means_of_integers_are_exact(self, topology, world_size, op):
        x = integers(world_size, 5003, (0, 1, 7, 8, 9, 19))
        call = Call(divisor=world_size if op == "mean" else 1)
        out = all_reduce(LOSSLESS, topology, x, call=call).outs[0]
        assert torch.equal(out, x.sum(0) / call.divisor)

    @every_topology
    def test_the_union_is_sent_in_equal_chunks(self, topology):
        """11 blocks of 20 over 4 ranks, the last one of 139 entries."""
        x = integers(4, 5003, (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 19))
        for payload, width in (("bf16", 2), ("fp32", 4)):
            sizes = payload_bytes(all_reduce(OmniReduceCompressor(payload=payload), topology, x))
            whole = BLOCK * width
            assert sizes == {0: 2 * whole, 1: 3 * whole, 2: 3 * whole, 3: 2 * whole + 139 * width}

    @every_topology
    def test_slices_send_their_own_blocks(self, topology):
        """Blocks begin where a slice begins."""
        x = torch.zeros(3, 2000)
        x[0, 299] = 1.0  # the second block of slice 0, of 44 entries
        x[1, 999] = 2.0  # the third block of slice 2
        x[2, 999] = 3.0
        outcome = reduce_scatter(LOSSLESS, topology, x, (0, 300, 300, 2000))
        sizes = payload_bytes(outcome)
        assert {chunk: size for chunk, size in sizes.items() if size} == {0: 44 * 4, 2: 256 * 4}
        assert torch.equal(torch.cat(outcome.outs), x.sum(0))

    @every_topology
    def test_every_byte_is_counted(self, topology):
        """Votes: a bit for each block, whole bytes for each rank, twice; then the union, twice."""
        n, blocks = 4, 83
        x = integers(n, blocks * BLOCK, (3, 50))
        outcome = all_reduce(OmniReduceCompressor(), topology, x)
        peers = sum(len(topology.schedule(n).peers(rank)) for rank in range(n))
        # 83 bits are 11 bytes: three each for three ranks, two for the last.
        crossings = 2 * (n - 1)
        expected = peers * HEADER_BYTES + crossings * (11 + 2 * BLOCK * 2)
        assert sum(outcome.bytes_sent) == expected

    @pytest.mark.parametrize("value", [1e-45, -1e-30, 3e38, torch.inf, torch.nan])
    def test_whatever_is_not_zero_arrives(self, value):
        x = torch.zeros(3, 2000)
        x[1, 700] = value
        outcome = all_reduce(LOSSLESS, Ring(), x)
        assert sum(payload_bytes(outcome).values()) == BLOCK * 4
        torch.testing.assert_close(outcome.outs[2], x[1], rtol=0, atol=0, equal_nan=True)

    @every_topology
    def test_nothing_is_sent_of_zeros(self, topology):
        x = torch.zeros(4, 3000)
        x[1, 5] = -0.0
        outcome = all_reduce(LOSSLESS, topology, x)
        assert not any(outcome.payloads.values())
        assert same_bits(outcome.outs[0], torch.zeros(3000))

    @every_topology
    @pytest.mark.parametrize("payload", ["bf16", "fp32"])
    def test_a_union_of_everything_is_an_uncompressed_call(self, topology, payload):
        """Bit for bit, in chunks of the same blocks."""
        x = sample(4, 8 * BLOCK)
        for call in (Call(), Call(divisor=4)):
            ours = all_reduce(OmniReduceCompressor(payload=payload), topology, x, call=call)
            assert same_bits(
                ours.outs[0], all_reduce(Uncompressed(payload), topology, x, call=call).outs[0]
            )

    def test_means_do_not_overflow(self):
        x = torch.full((3, 600), 3e38)
        out = all_reduce(LOSSLESS, Ring(), x, call=Call(divisor=3)).outs[0]
        assert torch.allclose(out, x[0])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_dtypes(self, dtype):
        x = integers(3, 1300, (0, 5)).to(dtype)
        outcome = all_reduce(LOSSLESS, Ring(), x, out_dtype=dtype)
        assert torch.equal(outcome.outs[0], x.sum(0))
        assert sum(payload_bytes(outcome).values()) == (256 + 20) * 4

    @every_topology
    def test_segments_of_many_blocks(self, topology):
        x = integers(3, 40 * BLOCK + 7, range(0, 41, 2))
        whole, cut = (all_reduce(LOSSLESS, topology, x, segments=s) for s in (1, 4))
        assert_same(whole, cut, payloads=False)
        assert len(cut.payloads) > len(whole.payloads)


class TestTopK:
    @every_topology
    @pytest.mark.parametrize("bounds", [None, uneven_bounds(9991, 4)])
    def test_the_union_of_the_strongest_blocks_arrives(self, topology, bounds):
        """At 10 of 32 bits, over √4: 5/32 of 40 blocks, or of the slices' blocks, for each rank."""
        x = sample(4, 9991, spread=0.3).mul(1e4).round()
        outcome = all_reduce(top(10.0), topology, x, bounds=bounds)
        slices = bounds or (0, 9991)
        blocks = sum(-(-(b - a) // BLOCK) for a, b in pairwise(slices))
        votes = round(blocks * 10 / 32 / 2)
        union = set().union(*(strongest(row, votes, bounds) for row in x))
        expected = torch.zeros(9991)
        for start, stop in union:
            expected[start:stop] = x[:, start:stop].sum(0)
        assert votes < len(union) < blocks
        assert torch.equal(outcome.outs[0], expected)
        sent = sum(stop - start for start, stop in union)
        assert sum(payload_bytes(outcome).values()) == 4 * sent

    def test_of_equals_the_first_are_sent_and_zeros_never(self):
        x = torch.zeros(2, 20 * BLOCK)
        x[:, 4 * BLOCK :] = 1.0
        x[:, 18 * BLOCK] = 2.0
        call = all_reduce(top(16.0), Ring(), x)
        votes = round(20 * 0.5 / 2**0.5)
        sent = call.outs[0].view(20, BLOCK)[:, 0].nonzero()[:, 0].tolist()
        assert sent == [*range(4, 4 + votes - 1), 18]
        x[:, 6 * BLOCK :] = 0.0
        assert sum(payload_bytes(all_reduce(top(16.0), Ring(), x)).values()) == 2 * BLOCK * 4

    @pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
    def test_votes_do_not_overflow_or_vanish(self, scale):
        """Norms whose squares float32 does not hold; beyond its range, equals."""
        x = torch.zeros(2, 30 * BLOCK)
        x[:, 7 * BLOCK] = scale
        x[:, 9 * BLOCK] = -scale
        out = all_reduce(top(5.0), Ring(), x).outs[0]
        assert torch.equal(out, x.sum(0))

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @every_topology
    def test_a_spoilt_block_is_sent_beside_the_others(self, topology, value):
        """Of one rank, in the weakest block; every other block is sent, or not, as before."""
        x = sample(4, 40 * BLOCK, spread=0.01).mul(1e4).round()  # every rank has its own votes
        x[:, 17 * BLOCK : 18 * BLOCK] = 0.0
        clean = all_reduce(top(), topology, x)
        x[2, 17 * BLOCK + 3] = value
        broken = all_reduce(top(), topology, x)
        expected = clean.outs[0].clone()
        expected[17 * BLOCK + 3] = value
        assert all(same_bits(out, broken.outs[0]) for out in broken.outs)
        torch.testing.assert_close(broken.outs[0], expected, rtol=0, atol=0, equal_nan=True)
        sizes = [sum(payload_bytes(outcome).values()) for outcome in (clean, broken)]
        assert sizes[1] == sizes[0] + BLOCK * 4

    def test_more_spoilt_blocks_than_votes_are_all_seen(self):
        x = sample(3, 20 * BLOCK)
        x[1, ::BLOCK] = torch.nan
        out = all_reduce(top(2.0), Ring(), x).outs[0]
        assert out[::BLOCK].isnan().all()
        assert out.isnan().sum() == 20


class TestNumberOfVotes:
    @pytest.mark.parametrize("topology", [Ring(), Direct()], ids=lambda t: t.kind)
    def test_it_settles_where_the_union_is_as_wanted(self, topology, gradients):
        """On a language model's gradients: 5 bits and the votes' 1/256."""
        x, states = gradients, None
        compressor = top(5.0, "bf16")
        for number in range(30):
            done = simulate(x, compressor, topology, Call(0, number), states)
            states = done.states
        assert done.bits_per_entry == pytest.approx(5 + 1 / BLOCK, rel=0.01)
        assert vnmse(done.result, x.double().sum(0)) < 0.08

    def test_each_step_is_the_formula(self):
        """k ← 0.8 k + 0.2 k · wanted / union, the ratio within [0.6, 1 / 0.6]."""
        states, share, ratios = None, 0.25 / 3**0.5, []
        for number in range(12):
            # Ranks vote alike at first, then for blocks of their own.
            x = sample(3, 100 * BLOCK, seed=number, spread=1.0 if number < 5 else 0.01)
            done = all_reduce(top(8.0), Ring(), x, call=Call(0, number), states=states)
            union = sum(payload_bytes(done).values()) / (BLOCK * 4)
            ratios.append(25 / union)
            share = min(0.25, share * (0.8 + 0.2 * min(max(ratios[-1], 0.6), 1 / 0.6)))
            states = done.states
            assert states[0].shared["share"].item() == pytest.approx(share, rel=1e-12)
            assert states[0].private == {}
        assert min(ratios) < 1 < max(ratios)

    def test_the_ratio_is_clipped(self):
        for ranks, change in ((9, 0.8 + 0.2 * 0.6), (1, 0.8 + 0.2 / 0.6)):
            x = torch.zeros(9, 90 * BLOCK)
            for rank in range(9):  # blocks of its own, or all the same
                x[rank, rank % ranks * 10 * BLOCK :][: 10 * BLOCK] = 1.0
            states = all_reduce(top(8.0), Ring(), x).states
            expected = 0.25 / 3 * change
            assert states[0].shared["share"].item() == pytest.approx(expected, rel=1e-12)

    def test_it_is_never_more_than_the_union_should_have(self):
        """However few blocks have entries: dense gradients may come next."""
        x = torch.zeros(4, 100 * BLOCK)
        x[:, 0] = 1.0
        states = None
        for number in range(20):
            done = all_reduce(top(8.0), Ring(), x, call=Call(0, number), states=states)
            states = done.states
        assert states[0].shared["share"].item() == 0.25

    def test_at_least_one_block_is_asked_for(self):
        states = None
        for number in range(12):
            x = torch.zeros(2, 4 * BLOCK)
            x[0, 0] = x[1, 300] = 1.0
            done = all_reduce(top(0.5), Ring(), x, call=Call(0, number), states=states)
            states = done.states
            assert torch.equal(done.outs[0], x.sum(0))
        assert states[0].shared["share"].item() == 0.25

    def test_calls_that_teach_nothing_leave_it(self):
        x = sample(3, 20 * BLOCK)
        states = all_reduce(top(), Ring(), x).states
        for value in (0.0, torch.nan):
            again = torch.zeros_like(x)
            again[1, 5000] = value
            after = all_reduce(top(), Ring(), again, call=Call(0, 1), states=states).states
            assert [state.shared for state in after] == [state.shared for state in states]

    def test_all_ranks_of_a_reduce_scatter_know_of_a_nan(self):
        x, bounds = sample(3, 20 * BLOCK), (0, 2000, 4000, 20 * BLOCK)
        states = reduce_scatter(top(), Ring(), x, bounds).states
        x[1, 3] = torch.nan
        after = reduce_scatter(top(), Ring(), x, bounds, call=Call(0, 1), states=states).states
        assert [state.shared for state in after] == [state.shared for state in states]

    def test_a_pipeline_keeps_it_by_key(self):
        """Two tensors in turn; each goes on where its own last call ended."""
        tensors = [sample(3, size, seed=size, spread=0.3) for size in (4000, 9000)]

        def run(pipeline):
            mine = [x[rank_of(pipeline)].clone() for _ in range(3) for x in tensors]
            for tensor in mine:
                pipeline.all_reduce(tensor, "sum", key=str(len(tensor)))
            return mine

        results = run_world(run, 3, compressor=top(), topology=Direct())
        states = [None, None]
        for number, outs in enumerate(zip(*results, strict=True)):
            which = number % 2
            done = simulate(tensors[which], top(), Direct(), Call(0, number), states[which])
            states[which] = done.states
            assert all(same_bits(out, done.result) for out in outs)

    def test_a_key_is_needed_for_it(self):
        assert top().needs_key
        assert not LOSSLESS.needs_key


def test_error_feedback_sends_later_what_was_not_asked_for():
    """What is kept and what has arrived add up to what was put in."""
    x = sample(3, 12 * BLOCK).mul(100).round()
    feedback, states, total = ErrorFeedback(top(8.0)), None, torch.zeros(12 * BLOCK)
    for number in range(6):
        done = all_reduce(feedback, Butterfly(), x, call=Call(0, number), states=states)
        states = done.states
        total += done.outs[0]
    kept = torch.stack([state.private["residual"] for state in states]).sum(0)
    assert kept.any()
    assert torch.equal(total + kept, 6 * x.sum(0))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"mode": "topk"}, "needs a bit_budget of at most the 16 bits of bf16, got None"),
        ({"mode": "topk", "bit_budget": 17}, "at most the 16 bits of bf16, got 17.0"),
        (
            {"mode": "topk", "bit_budget": 33, "payload": "fp32"},
            "at most the 32 bits of fp32, got 33.0",
        ),
        ({"mode": "topk", "bit_budget": 0}, "greater than 0"),
        ({"mode": "topk", "bit_budget": float("nan")}, "finite number"),
        ({"bit_budget": 5}, "sends what is not zero, whatever a budget of 5.0 bits says"),
        ({"mode": "best"}, "mode"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        OmniReduceCompressor(**options)


def test_a_call_is_addressed_like_any_other():
    """No randomness: neither seed nor number changes a bit."""
    x = sample(3, 3000)
    one, other = (all_reduce(top(), Ring(), x, call=call) for call in (Call(0, 0), Call(5, 9)))
    assert_same(one, other)
