"""What goes wrong with nodes of several ranks: every rank hears of it, and nothing hangs."""

import os
import signal
import time

import pytest
import torch

from dynamiq import (
    AgreementError,
    ConfigurationError,
    Direct,
    DynamiQCompressor,
    DynamiqError,
    ErrorFeedback,
    GlooTransport,
    Hierarchical,
    InputError,
    OmniReduceCompressor,
    PeerLostError,
    PeerTimeoutError,
    Pipeline,
    Ring,
    THCCompressor,
    TransportError,
    Uncompressed,
)
from dynamiq.core.compressor import State
from tests.contracts.compressor import sample
from tests.integrations.worlds import rank_of, run_world
from tests.processes import run_ranks

PAPER = DynamiQCompressor.paper()
PAIRS = Hierarchical(ranks_per_node=2)

# Ranks that disagree.


def told(errors, neighbours_of):
    """Check that ranks next to one that differs say why, and that all others lose a peer."""
    for rank, (kind, words) in enumerate(errors):
        assert issubclass(kind, (AgreementError, TransportError))
        if neighbours_of(rank):
            assert kind is AgreementError
            assert f"rank {rank} is in #" in words


@pytest.mark.parametrize("rendezvous", [False, True], ids=["eager", "rendezvous"])
@pytest.mark.parametrize("odd", [{0}, {3}, {0, 1}, {0, 2, 4}], ids=str)
def test_ranks_in_different_calls_find_out(odd, rendezvous):
    """Nothing was written by then."""

    def run(pipeline):
        mine = torch.ones(8 if rank_of(pipeline) in odd else 9)
        with pytest.raises(DynamiqError) as error:
            pipeline.all_reduce(mine, "sum")
        assert (mine == 1).all()
        return type(error.value), str(error.value)

    peers = PAIRS.schedule(6).peers
    told(
        run_world(run, 6, topology=PAIRS, rendezvous=rendezvous),
        lambda rank: any((rank in odd) != (peer in odd) for peer in peers(rank)),
    )


def test_a_column_whose_ranks_learnt_different_things_finds_out():
    """The state belongs to the column: ranks of the same node may have different ones."""
    compressor = OmniReduceCompressor(mode="topk", bit_budget=5)
    x = sample(6, 6000)
    # Of the first column's blocks every node has others, of the second's all have the same.
    x[:, 3072:] = x[0, 3072:]
    for rank in range(6):
        own = x[rank, rank // 2 * 1024 :][:1024].clone()
        x[rank, :3072] = 0
        x[rank, rank // 2 * 1024 :][:1024] = own

    def run(pipeline):
        mine = x[rank_of(pipeline)].clone()
        pipeline.all_reduce(mine.clone(), key="x")
        pipeline.all_reduce(mine.clone(), key="x")  # by now the columns have different ones
        states = pipeline._session._states
        before = states["x"].shared
        if rank_of(pipeline) == 3:
            states["x"] = State({name: 2 * value for name, value in before.items()})
        with pytest.raises(DynamiqError) as error:
            pipeline.all_reduce(mine, key="x")
        return type(error.value), str(error.value), before

    results = run_world(run, 6, compressor=compressor, topology=PAIRS)
    column = PAIRS.schedule(6).column(3)
    told([result[:2] for result in results], lambda rank: rank in column)
    shares = [before["share"].item() for *_, before in results]
    assert shares[0] != shares[1]
    assert shares[::2] == [shares[0]] * 3


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Hierarchical(ranks_per_node=4), '"ranks_per_node": 4'),
        (Hierarchical(ranks_per_node=3), '"ranks_per_node": 3'),
        (Hierarchical(ranks_per_node=2, intra=Direct()), '"intra": {"kind": "direct"}'),
        (Hierarchical(ranks_per_node=2, inter=Direct()), '"inter": {"kind": "direct"}'),
        (Hierarchical(ranks_per_node=2, local=Uncompressed("bf16")), '"format": "bf16"'),
        (Ring(), '"kind": "ring"'),
    ],
    ids=["two-nodes", "no-multiple", "intra", "inter", "local", "ring"],
)
def test_ranks_that_are_configured_differently_find_out(other, words):
    def run(pipeline):
        mine = torch.ones(9)
        with pytest.raises(
            AgreementError, match="configured differently: topology: rank 0 has"
        ) as e:
            pipeline.all_reduce(mine)
        assert (mine == 1).all()
        return str(e.value)

    def of_rank(rank):
        return {"topology": other if rank == 2 else PAIRS}

    for text in run_world(run, 4, of_rank=of_rank):
        assert words in text


# What cannot work is refused before anything is sent.


def test_a_world_that_is_no_multiple_is_refused_on_every_rank():
    def run(pipeline):
        with pytest.raises(ConfigurationError, match="5 ranks cannot be split into nodes of 2"):
            pipeline.connect()

    run_world(run, 5, topology=PAIRS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ranks_per_node": 0}, "ranks_per_node=0"),
        ({"ranks_per_node": 2, "intra": PAIRS}, "one level"),
        ({"ranks_per_node": 2, "inter": PAIRS}, "one level"),
        ({"ranks_per_node": 2, "local": ErrorFeedback(PAPER)}, "carries state"),
        ({"ranks_per_node": 2, "local": OmniReduceCompressor(mode="topk", bit_budget=5)}, "state"),
    ],
)
def test_what_cannot_work_is_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        Hierarchical(**options)


@pytest.mark.parametrize("local", [Uncompressed(), THCCompressor()], ids=lambda c: c.kind)
@pytest.mark.parametrize("fits", [2, 3, 6])
def test_a_format_must_sum_the_ranks_that_it_meets(monkeypatch, local, fits):
    """Nodes, if it travels between them; the ranks of a node, if it stays inside."""
    met = set()

    def refuse(self, world_size):
        met.add(world_size)
        if world_size > fits:
            raise ConfigurationError(f"{world_size} ranks are too many")

    monkeypatch.setattr(THCCompressor, "check_world_size", refuse)
    topology = Hierarchical(ranks_per_node=2, local=local)
    run = lambda pipeline: pipeline.all_reduce(torch.ones(9))  # noqa: E731
    results = run_world(run, 6, catch=True, compressor=THCCompressor(), topology=topology)
    refused = (ConfigurationError, "3 ranks are too many")
    assert [r and (type(r), str(r)) for r in results] == [refused if fits < 3 else None] * 6
    assert max(met) == 3
    assert (2 in met) is (local.kind == "thc")


FEEDBACK = (ErrorFeedback(PAPER), THCCompressor(error_feedback=True))


@pytest.mark.parametrize("compressor", FEEDBACK, ids=lambda c: c.kind)
def test_a_key_belongs_to_the_same_slices_of_entries(compressor):
    """What a rank keeps belongs to entries of its column: other slices would mix them up."""
    cut, otherwise = (0, 1000, 3000, 4000, 6000), (0, 3000, 4000, 5000, 6000)

    def run(pipeline):
        r = rank_of(pipeline)

        def scatter(bounds):
            out = torch.empty(bounds[r + 1] - bounds[r])
            pipeline.reduce_scatter(out, torch.ones(6000), key="x", bounds=bounds)
            return out

        scatter(cut)
        sent = pipeline.metrics().bytes_sent
        with pytest.raises(InputError, match=r"6000 entries in slices \[0, 3000, .*keeps what"):
            scatter(otherwise)
        with pytest.raises(InputError, match="of 6000 entries came with the key 'x'"):
            pipeline.all_reduce(torch.ones(6000), key="x")
        with pytest.raises(InputError, match="different keys"):
            pipeline.reduce_scatter(torch.ones(1500), torch.ones(6000), key="x")
        assert pipeline.metrics().bytes_sent == sent
        assert (scatter(cut) - 1).abs().max() < 1
        return pipeline.metrics().calls

    assert run_world(run, 4, compressor=compressor, topology=PAIRS) == [2] * 4


@pytest.mark.parametrize(
    "topology", [Ring(), Hierarchical(ranks_per_node=1), Hierarchical(ranks_per_node=4)], ids=str
)
def test_where_all_entries_are_one_ranks_slices_do_not_matter(topology):
    def run(pipeline):
        r = rank_of(pipeline)
        for bounds in ((0, 1000, 3000, 4000, 6000), (0, 3000, 4000, 5000, 6000)):
            out = torch.empty(bounds[r + 1] - bounds[r])
            pipeline.reduce_scatter(out, torch.ones(6000), key="x", bounds=bounds)
            assert (out - 1).abs().max() < 0.5
        pipeline.all_reduce(torch.ones(6000), key="x")

    run_world(run, 4, compressor=ErrorFeedback(PAPER), topology=topology)


# Peers that go away.


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("gone", [1, 2])
def test_a_peer_that_closes(gone, background):
    def run(pipeline):
        pipeline.all_reduce(torch.ones(100))
        if rank_of(pipeline) == gone:
            pipeline.close()
            return PeerLostError
        with pytest.raises(DynamiqError) as error:
            handle = pipeline.all_reduce(torch.ones(100), async_op=background)
            if handle is not None:
                handle.wait()
        with pytest.raises(type(error.value)):
            pipeline.all_reduce(torch.ones(100))
        return type(error.value)

    assert set(run_world(run, 4, topology=PAIRS)) == {PeerLostError}


def test_a_peer_that_stays_silent():
    """Its neighbours in the node and in the column name it; the rank across follows them."""

    def run(pipeline):
        pipeline.all_reduce(torch.ones(100))
        if rank_of(pipeline) == 3:
            return None
        with pytest.raises(TransportError) as error:
            pipeline.all_reduce(torch.ones(100))
        return type(error.value), str(error.value)

    far, column, node, _ = run_world(run, 4, topology=PAIRS, timeout_s=0.5)
    assert {node[0], column[0], far[0]} <= {PeerTimeoutError, PeerLostError}
    assert PeerTimeoutError in (node[0], column[0])
    for kind, words in (node, column):
        assert kind is PeerLostError or "rank 3" in words


def lose_a_peer(rank, moment):
    """Rank 3 dies when it is about to post what has this in its label."""
    pipeline = Pipeline(PAPER, PAIRS, GlooTransport(timeout_s=30), min_numel=0)
    pipeline.all_reduce(torch.ones(1000))
    if rank == 3:
        post = pipeline.transport.post

        def die(*exchange):
            if moment in exchange[5]:
                os.kill(os.getpid(), signal.SIGKILL)
            return post(*exchange)

        pipeline.transport.post = die
    began = time.monotonic()
    try:
        pipeline.all_reduce(torch.ones(1000))
    except DynamiqError as error:
        return type(error), time.monotonic() - began < 20
    return "ended well", True


@pytest.mark.parametrize(
    "moment",
    [
        "inside node 1, gradients",
        *(
            pytest.param(moment, marks=pytest.mark.soak)
            for moment in ("header", "statistics", "between nodes, gradients", "result, all-gather")
        ),
    ],
)
def test_a_killed_peer(moment):
    """Its neighbours in the node and in the column, and the rank across, hear of it at once."""
    across, column, node, dead = run_ranks(lose_a_peer, 4, moment, lost={3})
    lost = PeerLostError, True
    # Once the columns have ended, all that is missing is what its node wants to have from it.
    others = ("ended well", True) if "result" in moment else lost
    assert (across, column, node, dead) == (others, others, lost, None)
