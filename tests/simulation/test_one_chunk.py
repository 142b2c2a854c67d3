"""One chunk against real calls: the same bits where all is the same, the same error elsewhere."""

import statistics
from typing import Literal

import pytest
import torch
from pydantic import PrivateAttr

from dynamiq.compressors import DynamiQCompressor, Uncompressed
from dynamiq.core.collective import Collective
from dynamiq.core.compressor import Compressor, State
from dynamiq.core.drivers import Meter, lockstep
from dynamiq.core.errors import ConfigurationError, InputError
from dynamiq.core.message import Call
from dynamiq.core.registry import AnyCompressor
from dynamiq.simulation.figures import relative
from dynamiq.simulation.one_chunk import PIECE, OneChunk, Piece
from dynamiq.simulation.sources import Drawn, mixture
from dynamiq.simulation.worlds import AllChunks, Attempt
from dynamiq.topologies import Butterfly, Direct, Ring
from tests.contracts.compressor import same_bits
from tests.probes import AdaptiveFixedPoint

STOCHASTIC = DynamiQCompressor.paper(5.0, rounding="stochastic")
every_topology = pytest.mark.parametrize(
    "topology", [Ring(), Butterfly(), Direct()], ids=lambda t: t.kind
)


class Told(Compressor):
    """A format that is told its reduced statistics by whoever used it first."""

    kind: Literal["told"] = "told"
    inner: AnyCompressor
    _known: list = PrivateAttr(default_factory=list)

    def unit(self, numel, world_size):
        return self.inner.unit(numel, world_size)

    def statistics(self, x, layout, call, state):
        return self.inner.statistics(x, layout, call, state)

    def encode(self, statistics, layout, schedule, call, state):
        self._known.append(statistics)
        return self.inner.encode(self._known[0], layout, schedule, call, state)


class Reminder(Uncompressed):
    """Remembers the sum."""

    kind: Literal["reminder"] = "reminder"

    def next_state(self, encoding, work):
        return State(shared={"sum": work.clone()})


@every_topology
@pytest.mark.parametrize("world_size", [2, 5, 8])
@pytest.mark.parametrize(
    "inner",
    [
        STOCHASTIC,
        DynamiQCompressor.rotated(4.0),
        DynamiQCompressor.local(4.0),
        Uncompressed("bf16"),
    ],
    ids=["stochastic", "rotated", "local", "bf16"],
)
def test_is_a_real_call_whose_first_chunk_holds_everything(topology, world_size, inner):
    n, spectrum = world_size, mixture(30 * 256, seed=4)
    told = Told(inner=inner)
    call = Call(7, 2)
    schedule = topology.schedule(n)
    piece = Piece(spectrum, told, schedule, call).run()

    x = spectrum.matrix(n)
    d = x.shape[1]
    outs, meters = [torch.empty(d) for _ in range(n)], [Meter() for _ in range(n)]
    bounds = (0, *[d] * n)
    calls = [Collective(told, schedule, r, d, call, bounds=bounds) for r in range(n)]
    with torch.no_grad():
        lockstep([c.run(x[r], outs[r]) for r, c in enumerate(calls)], meters)
    headers = sum(16 * len(schedule.peers(r)) for r in range(n))

    assert same_bits(piece.estimate, outs[0])
    assert piece.bytes_sent == sum(meter.bytes_sent for meter in meters) - headers
    assert torch.allclose(piece.target().total, x.double().sum(0), rtol=1e-12, atol=0)
    assert torch.allclose(piece.target().mean_square, x.double().square().mean(0), rtol=1e-12)


@pytest.mark.parametrize(
    "topology",
    [Ring(), Butterfly(), pytest.param(Direct(), marks=pytest.mark.soak)],
    ids=lambda t: t.kind,
)
@pytest.mark.parametrize(
    ("world_size", "compressor"),
    [(4, STOCHASTIC), (9, STOCHASTIC), (16, STOCHASTIC), (5, DynamiQCompressor.rotated(4.0))],
    ids=["4", "9", "16", "5-rotated"],
)
def test_stands_for_all_chunks(topology, world_size, compressor):
    """A bucket in which every chunk has the supergroups of the one chunk."""
    rho = 0.0 if compressor.stateful else 0.1
    spectrum = Drawn(torch.linspace(2.0, -6.0, 64).exp(), rho)
    repeated = Drawn(spectrum.deviations.repeat(world_size), rho, seed=1)
    one, every = OneChunk(spectrum, world_size), AllChunks(repeated.matrix(world_size))
    errors, bits = [], []
    for world in (one, every):
        trials = [world.run(compressor, topology, Attempt(seed, 1)) for seed in range(3)]
        found = [relative(trial.estimate - world.target.total, world.target) for trial in trials]
        errors.append(statistics.fmean(found))
        bits.append(trials[0].bits_per_entry)

    assert errors[0] == pytest.approx(errors[1], rel=0.1)
    assert bits[0] == pytest.approx(bits[1], abs=0.03)


@every_topology
def test_pieces_are_parts_of_one_chunk(topology):
    spectrum = mixture((PIECE + 1) * 256, seed=0)
    world = OneChunk(spectrum, 3)
    trial = world.run(STOCHASTIC, topology, Attempt())
    hands = spectrum.dealt(2)
    exact = torch.cat([hand.matrix(3).double().sum(0) for hand in hands])

    assert trial.estimate.shape == (spectrum.numel,) == (world.numel,)
    assert torch.allclose(world.target.total, exact, rtol=1e-12, atol=0)
    assert relative(trial.estimate - exact, world.target) < 0.1
    assert 4.9 < trial.bits_per_entry <= 5.0
    bits = 2 * 2 * trial.bits_per_entry * spectrum.numel
    assert 8 * trial.bytes_per_rank == pytest.approx(bits)
    first = [
        Piece(hand, STOCHASTIC, topology.schedule(3), Call(0, i)) for i, hand in enumerate(hands)
    ]
    assert same_bits(trial.estimate, torch.cat([piece.run().estimate for piece in first]))


def test_statistics_are_those_of_all_ranks_on_the_average():
    spectrum, n = mixture(30 * 256, seed=4), 6
    told = Told(inner=DynamiQCompressor.paper(rounding="stochastic"))
    Piece(spectrum, told, Ring().schedule(n), Call())
    energies, means = told._known[0].double().view(2, -1)

    assert torch.allclose(energies, n * 256 * spectrum.deviations.double().square(), rtol=2**-8)
    assert not means.any()


def test_formats_learn_from_a_sum_like_the_real_one():
    spectrum, n = Drawn(torch.tensor([3.0, 1.0, 0.5] * 20), correlation=0.25), 5
    state = Piece(spectrum, Reminder("fp32"), Ring().schedule(n), Call()).learn()
    squares = state.shared["sum"].view(-1, 256).square().mean(1)
    expected = spectrum.deviations.square() * n * (1 + (n - 1) * 0.25)
    assert (squares / expected).mean().item() == pytest.approx(1.0, abs=0.05)


def test_what_was_learned_is_used():
    """Hops have the shares that they have in a real run, not those of a first call."""
    n, compressor = 5, DynamiQCompressor.rotated(4.0)
    spectrum = Drawn(torch.tensor([1.0, 1e-9]).repeat_interleave(32))
    repeated = Drawn(spectrum.deviations.repeat(n), seed=1)
    one, every = OneChunk(spectrum, n), AllChunks(repeated.matrix(n))
    shares = [
        [seen.payload_bytes / seen.entries for _, seen in sorted(trial.log.hops.items())]
        for trial in (
            every.run(compressor, Ring(), Attempt(0, 1, watch=True)),
            one.run(compressor, Ring(), Attempt(0, 1, watch=True)),
            one.run(compressor, Ring(), Attempt(0, 0, watch=True)),
        )
    ]
    assert shares[1] == pytest.approx(shares[0], rel=0.03)
    assert shares[2] != pytest.approx(shares[0], rel=0.05)


def test_seeds_round_the_same_entries():
    world = OneChunk(mixture(2560, seed=0), 3)
    estimates = [world.run(STOCHASTIC, Ring(), Attempt(seed)).estimate for seed in (0, 0, 1)]
    assert same_bits(estimates[0], estimates[1])
    assert not torch.equal(estimates[0], estimates[2])
    assert relative(estimates[2] - estimates[0].double(), world.target) < 0.1


def test_messages_of_the_first_piece_are_watched():
    world = OneChunk(mixture((PIECE + 1) * 256, seed=0), 9)
    trial = world.run(STOCHASTIC, Ring(), Attempt(watch=True))
    plain = world.run(STOCHASTIC, Ring(), Attempt())
    log, first = trial.log, slice(0, 257 * 256)

    assert same_bits(trial.estimate, plain.estimate)
    assert (trial.bytes_per_rank, plain.log.hops) == (plain.bytes_per_rank, {})
    assert sorted(log.hops) == list(range(9))
    assert {(s.messages, s.entries) for s in log.hops.values()} == {(1, 257 * 256)}
    assert log.energy == pytest.approx(world.target.total[first].square().sum().item())
    error = (trial.estimate - world.target.total)[first].square().sum().item()
    assert sum(s.squared_error for s in log.hops.values()) == pytest.approx(error, rel=0.15)


def test_what_needs_all_ranks_is_refused():
    world = OneChunk(mixture(256, seed=0), 3)
    for compressor, complaint in (
        (DynamiQCompressor.paper(), "correlated rounding cannot be simulated on one chunk"),
        (AdaptiveFixedPoint(), "one chunk of a spectrum has no max over ranks"),
    ):
        with pytest.raises(ConfigurationError, match=complaint):
            world.run(compressor, Ring(), Attempt())


def test_the_target_is_known_after_a_call():
    with pytest.raises(InputError, match="known once a call has drawn it"):
        OneChunk(mixture(256, seed=0), 3).target  # noqa: B018


@every_topology
def test_few_payloads_are_kept(topology):
    """Of 33 ranks: one of each size on a butterfly, and one where all send to one."""
    piece = Piece(mixture(2560, 0), Uncompressed("bf16"), topology.schedule(33), Call())
    kept, arriving = [], piece._arriving

    def watched(message):
        kept.append(len(piece._payloads))
        return arriving(message)

    piece._arriving = watched
    piece.run()
    assert len(kept) == 32
    assert max(kept) <= {"ring": 2, "butterfly": 8, "direct": 1}[topology.kind]
