"""Error feedback: what messages lose is kept by who compressed them, and sent later."""

import gc
import json
from itertools import pairwise

import pytest
import torch

from dynamiq import (
    Butterfly,
    ConfigurationError,
    DynamiQCompressor,
    ErrorFeedback,
    GlooTransport,
    InputError,
    Ring,
    State,
    Uncompressed,
    compressor_registry,
)
from dynamiq.core.message import Call
from tests.contracts import compressor as contract
from tests.contracts.compressor import (
    all_reduce,
    assert_same,
    assert_same_state,
    reduce_scatter,
    same_bits,
    sample,
    uneven_bounds,
)
from tests.integrations.worlds import build, rank_of, run_world
from tests.probes import AdaptiveFixedPoint, FloatPerHop, NonZeroBlocks, RotatedIntegers
from tests.processes import run_ranks
from tests.test_pipeline_memory import Allocations

NEAREST = DynamiQCompressor.paper(3.0, rounding="nearest")
FP8 = FloatPerHop(formats=("fp8",))
INNER = [
    Uncompressed("bf16"),
    NEAREST,
    FloatPerHop(),
    FP8,
    RotatedIntegers(),
    NonZeroBlocks(),
    AdaptiveFixedPoint(),
    DynamiQCompressor.rotated(4.0),
]
TOPOLOGIES = [Ring(), Butterfly()]

every_topology = pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: t.kind)
every_inner = pytest.mark.parametrize("inner", INNER, ids=lambda c: str(c.to_dict()))
every_world_size = pytest.mark.parametrize("world_size", range(1, 6))


def residual(state):
    return state.private["residual"]


def repeated(compressor, topology, x, calls):
    """Return the all-reduced x[n, d] of every call, float64[calls, d]."""
    results, states = [], None
    for number in range(calls):
        outcome = all_reduce(compressor, topology, x, call=Call(0, number), states=states)
        results.append(outcome.outs[0].double())
        states = outcome.states if compressor.stateful else None
    return torch.stack(results)


@pytest.mark.parametrize("law", contract.LAWS, ids=contract.name)
@every_topology
def test_contract_at_few_bits(topology, law):
    """Other inner formats are in tests/core/formats.py."""
    law(ErrorFeedback(DynamiQCompressor.paper(3.5, rounding="nearest")), topology)


# What is kept.


def lost_by(rank, x, encoding, call, outcome, schedule):
    """Return float64[d]: what one rank put in or received, less what it said, payload by payload.

    Encodings may subtract the same mean from every rank's entries. It is seen in what they store
    when nothing was put in: the means of all other ranks.
    """

    def stored(payload=None, message=None, positions=None):
        nothing, values = torch.zeros_like(x), torch.empty_like(x)
        work = encoding.load(nothing, rank, torch.empty_like(x))
        if payload is not None:
            copy = torch.tensor(list(payload), dtype=torch.uint8)
            encoding.decompress_accumulate(copy, work, message, positions)
        encoding.store(work, values)
        return values.double() * call.divisor

    empty = stored()
    received = {m for step in schedule.steps(rank) if step.reduce for m in step.receives}
    lost = x.double() - empty / (schedule.world_size - 1)
    for (message, positions), payload in outcome.payloads.items():
        sign = (message in received) - (message.sender == rank)
        if sign:
            lost += sign * (stored(payload, message, positions) - empty)
    return lost


@pytest.mark.parametrize("divisor", [1, 3])
@pytest.mark.parametrize("inner", [Uncompressed("bf16"), NEAREST, FP8], ids=lambda c: c.kind)
@pytest.mark.parametrize("world_size", range(2, 6))
@every_topology
def test_a_rank_keeps_the_errors_of_its_own_messages(
    topology, world_size, inner, divisor, monkeypatch
):
    encodings, encode = [], type(inner).encode

    def noted(self, *arguments):
        encodings.append(encode(self, *arguments))
        return encodings[-1]

    monkeypatch.setattr(type(inner), "encode", noted)
    x = 0.01 + sample(world_size, 700, spread=0.5)
    call = Call(3, 5, divisor)
    outcome = all_reduce(ErrorFeedback(inner), topology, x, call=call)
    schedule = topology.schedule(world_size)
    for rank, state in enumerate(outcome.states):
        lost = lost_by(rank, x[rank], encodings[0], call, outcome, schedule)
        assert lost.norm() > 1e-4 * x[rank].norm(), "or this test shows nothing"
        assert (residual(state) - lost).norm() <= 1e-3 * lost.norm()


@every_topology
def test_a_reduce_scatter_loses_nothing_of_the_own_slice(topology):
    x, bounds = sample(4, 600), (0, 100, 100, 350, 600)
    states = reduce_scatter(ErrorFeedback(FP8), topology, x, bounds).states
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        kept = residual(states[rank]).abs() / x.abs().sum(0)
        assert (kept[start:stop] < 1e-6).all()
        others = torch.cat([kept[:start], kept[stop:]])
        assert others.median() > 1e-3


def test_one_rank_keeps_nothing():
    x = sample(1, 600)
    outcome = all_reduce(ErrorFeedback(NEAREST), Ring(), x)

    assert same_bits(outcome.outs[0], x[0])
    assert outcome.states == [State()]


# Nothing is lost, only late.


def check_totals(run, inner, divisor=1):
    """Check that results and what is still kept add up to all that was put in.

    Args:
        run: Reduces x[n, 600] with a compressor, a call and states; returns an outcome.
        inner: The inner format.
        divisor: Of the call.
    """
    total, delivered, states = 0.0, 0.0, None
    for number in range(4):
        x = sample(run.world_size, 600, seed=number)
        outcome = run(ErrorFeedback(inner), x, call=Call(0, number, divisor), states=states)
        states = outcome.states
        total += x.double().sum(0)
        delivered += run.result(outcome).double() * divisor
        kept = sum(residual(state).double() for state in states)
        assert (delivered + kept - total).norm() <= 3e-7 * total.norm(), number


class AllReduce:
    """All ranks end with the same bits in every call."""

    def __init__(self, topology, world_size):
        self.topology, self.world_size = topology, world_size

    def __call__(self, compressor, x, **setting):
        return all_reduce(compressor, self.topology, x, **setting)

    def result(self, outcome):
        assert all(same_bits(out, outcome.outs[0]) for out in outcome.outs)
        return outcome.outs[0]


class ReduceScatter(AllReduce):
    """Into slices of very different sizes."""

    def __call__(self, compressor, x, **setting):
        bounds = uneven_bounds(600, self.world_size)
        return reduce_scatter(compressor, self.topology, x, bounds, **setting)

    def result(self, outcome):
        return torch.cat(outcome.outs)


@pytest.mark.parametrize("collective", [AllReduce, ReduceScatter])
@pytest.mark.parametrize("divisor", [1, 4])
@every_inner
@every_topology
def test_nothing_is_lost_only_late(topology, inner, divisor, collective):
    check_totals(collective(topology, 4), inner, divisor)


@pytest.mark.parametrize("collective", [AllReduce, ReduceScatter])
@pytest.mark.parametrize("world_size", [2, 3, 5])
@every_topology
def test_nothing_is_lost_with_any_number_of_ranks(topology, world_size, collective):
    check_totals(collective(topology, world_size), NEAREST, world_size)


@pytest.mark.parametrize("inner", [FP8, NEAREST], ids=lambda c: c.kind)
@every_topology
def test_the_mean_error_falls_as_one_over_calls(topology, inner):
    """Of constant gradients; a biased format without feedback stays where it is."""
    x = sample(4, 2048, spread=0.5)
    exact = x.double().sum(0)

    def errors(compressor):
        means = repeated(compressor, topology, x, 32).cumsum(0)
        return [(means[t - 1] / t - exact).norm() for t in (1, 8, 32)]

    first, eighth, last = errors(ErrorFeedback(inner))
    assert last < 0.35 * eighth < 0.15 * first, "a quarter, and an eighth"
    first, _, last = errors(inner)
    assert last > 0.5 * first


# What the inner format sees.


def test_entries_that_were_zero_are_sent_once_something_is_owed():
    """Statistics see what is loaded, not what was given."""
    states = [State(private={"residual": torch.full((16,), float(r))}) for r in range(3)]
    outcome = all_reduce(ErrorFeedback(NonZeroBlocks()), Ring(), torch.zeros(3, 16), states=states)

    assert torch.equal(outcome.outs[0], torch.full((16,), 3.0))


@every_inner
@every_topology
def test_a_call_is_the_inner_one_of_the_corrected_entries(topology, inner):
    """The same bytes and bits, fused steps included."""
    x = sample(4, 600)
    outcome = all_reduce(ErrorFeedback(inner), topology, x)
    corrected = x + torch.stack([residual(state) for state in outcome.states])
    call = Call(0, 1)
    again = all_reduce(ErrorFeedback(inner), topology, x, call=call, states=outcome.states)
    strip = len("inner.")
    states = [
        State(shared={name[strip:]: value for name, value in state.shared.items()})
        for state in outcome.states
    ]
    plain = all_reduce(inner, topology, corrected, call=call, states=states)

    assert again.payloads == plain.payloads
    assert all(same_bits(a, b) for a, b in zip(again.outs, plain.outs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inner", [Uncompressed("bf16"), NEAREST], ids=lambda c: c.kind)
def test_narrow_entries_in_place_lose_no_more(inner, dtype):
    """Entries are corrected in float32, before the result takes their place."""
    narrow = sample(4, 600, spread=0.5).to(dtype)
    states = {"narrow": None, "wide": None}
    for number in range(3):
        call = Call(0, number)
        outcomes = {
            name: all_reduce(
                ErrorFeedback(inner), Ring(), x, call=call, states=states[name], in_place=place
            )
            for name, x, place in (("narrow", narrow, True), ("wide", narrow.float(), False))
        }
        states = {name: outcome.states for name, outcome in outcomes.items()}
        assert same_bits(outcomes["narrow"].outs[0], outcomes["wide"].outs[0].to(dtype))
        for a, b in zip(*states.values(), strict=True):
            assert residual(a).dtype == torch.float32
            assert_same_state(a, b)


def test_float64_entries_stay_float64():
    """What FP64 messages lose is nothing, as without feedback."""
    x = sample(3, 600).double() + torch.randn(3, 600, dtype=torch.float64) * 1e-12
    setting = {"out_dtype": torch.float64}
    inner = Uncompressed("fp64")
    outcome = all_reduce(ErrorFeedback(inner), Ring(), x, **setting)

    assert same_bits(outcome.outs[0], all_reduce(inner, Ring(), x, **setting).outs[0])
    assert all(residual(state).abs().max() < 1e-15 for state in outcome.states)


# State.


def test_the_inner_state_is_kept_apart():
    outcome = all_reduce(ErrorFeedback(AdaptiveFixedPoint()), Ring(), sample(3, 16))

    for state in outcome.states:
        assert state.shared.keys() == {"inner.bytes"}
        assert state.private.keys() == {"residual"}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("inner", [Uncompressed("bf16"), NEAREST], ids=lambda c: c.kind)
@every_topology
def test_a_non_finite_call_is_as_if_it_had_not_been(topology, inner, value):
    compressor = ErrorFeedback(inner)
    x = sample(4, 600)
    broken = x.clone()
    broken[2, 599] = value
    first = all_reduce(compressor, topology, broken)
    assert not first.outs[0].isfinite().all()
    assert all((residual(state) == 0).all() for state in first.states)

    before = all_reduce(compressor, topology, x, call=Call(0, 1)).states
    after = all_reduce(compressor, topology, broken, call=Call(0, 2), states=before).states
    for a, b in zip(before, after, strict=True):
        assert_same_state(a, b)
    third = [
        all_reduce(compressor, topology, x, call=Call(0, 3), states=states)
        for states in (before, after)
    ]
    assert_same(*third)


def test_a_sum_that_only_the_result_cannot_hold_is_a_non_finite_call():
    x = torch.full((2, 600), 60000.0)
    x[:, 1:] *= sample(1, 599).sign()
    compressor = ErrorFeedback(Uncompressed("bf16"))
    states = all_reduce(compressor, Ring(), sample(2, 600)).states
    outcome = all_reduce(compressor, Ring(), x, states=states, out_dtype=torch.float16)

    assert outcome.outs[0].isinf().any()
    for before, after in zip(states, outcome.states, strict=True):
        assert_same_state(before, after)


def test_ranks_agree_on_the_inner_state_when_one_slice_overflows():
    """Residuals are a rank's own affair, the inner state is not."""
    x, bounds = sample(4, 600), (0, 150, 300, 450, 600)
    x[:, 310:320] = 3e38
    compressor = ErrorFeedback(AdaptiveFixedPoint())
    outcome = reduce_scatter(compressor, Ring(), x, bounds)
    finite = [bool(out.isfinite().all()) for out in outcome.outs]
    assert finite == [True, True, False, True]

    assert all(int(state.shared["inner.bytes"]) == 3 for state in outcome.states)
    assert all(residual(state).isfinite().all() for state in outcome.states)
    reduce_scatter(compressor, Ring(), sample(4, 600), bounds, states=outcome.states)


# In a pipeline.


@every_world_size
def test_a_pipeline_keeps_residuals_by_key(world_size):
    """Over calls in the background, with another tensor's in between: what arrives adds up."""
    x, other = sample(world_size, 600, spread=0.5), 1e3 * sample(world_size, 600, seed=1)
    exact = x.double().sum(0)
    steps = 24

    def run(pipeline):
        total = torch.zeros(600, dtype=torch.float64)
        for _ in range(steps):
            mine, theirs = (t[rank_of(pipeline)].clone() for t in (x, other))
            handles = [
                pipeline.all_reduce(tensor, "sum", key=key, async_op=True)
                for key, tensor in (("x", mine), ("other", theirs))
            ]
            for handle in handles:
                handle.wait()
            total += mine
        return total

    totals = run_world(run, world_size, compressor=ErrorFeedback(NEAREST))
    assert all(same_bits(total, totals[0]) for total in totals)
    once = all_reduce(NEAREST, Ring(), x).outs[0].double()
    error = (totals[0] / steps - exact).norm()
    assert error <= 0.2 * (once - exact).norm() + 1e-6 * exact.norm()


def test_a_call_needs_a_key():
    def run(pipeline):
        with pytest.raises(InputError, match=r"error_feedback carries state .* key="):
            pipeline.all_reduce(torch.ones(600))

    run_world(run, 2, compressor=ErrorFeedback(NEAREST))


def test_a_key_belongs_to_one_size():
    compressor = ErrorFeedback(Uncompressed("bf16"))
    states = all_reduce(compressor, Ring(), sample(2, 600)).states
    with pytest.raises(InputError, match=r"500 entries .* errors of 600 entries"):
        all_reduce(compressor, Ring(), sample(2, 500), states=states)


def peaks(rank, compressor, topology, numel):
    """Return the most bytes per entry that there were in any call."""
    x = sample(1, numel, seed=rank)[0]
    with build(GlooTransport(), compressor=compressor, topology=topology) as pipeline:
        pipeline.connect()
        with Allocations() as seen:
            for _ in range(GlooTransport.channels + 3):
                pipeline.all_reduce(x, key="x")
                gc.collect()
    return seen.peak_bytes / numel


def test_memory_is_what_the_docs_say():
    """18 bytes an entry at the most, what the transport keeps of earlier calls included."""
    measured = run_ranks(peaks, 2, ErrorFeedback(DynamiQCompressor.paper(5)), Butterfly(), 100_000)
    assert all(17 < peak <= 18 for peak in measured), measured


# As a description.


def test_it_is_read_back_with_what_is_inside():
    compressor = ErrorFeedback(NEAREST)
    again = compressor_registry.read(json.loads(json.dumps(compressor.to_dict())))

    assert again == compressor == ErrorFeedback(compressor=NEAREST)
    assert type(again.compressor) is DynamiQCompressor
    assert again.compressor == NEAREST
    assert again.digest() == compressor.digest() != ErrorFeedback(FP8).digest()


def test_a_loss_is_not_sent_twice():
    with pytest.raises(ConfigurationError, match="every loss twice"):
        ErrorFeedback(ErrorFeedback(NEAREST))
