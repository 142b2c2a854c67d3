"""MXCompressor: sizes, blocks that are not finite, sums that overflow, means, shared scales."""

from math import inf, nan

import pytest
import torch

from dynamiq import Butterfly, Call, MXCompressor, Ring, measure_error
from dynamiq.compressors.mx import MU, RECOVERY, SATURATED, rounded_up_to_bfloat16
from dynamiq.core.compressor import State
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.layout import Layout
from dynamiq.core.message import Message
from dynamiq.kernels.mx import ops, reference
from dynamiq.kernels.mx.wire import ELEMENTS
from tests.contracts.compressor import all_reduce, reduce_scatter, same_bits, sample

LARGEST = torch.finfo(torch.float32).max
every_format = pytest.mark.parametrize("name", ELEMENTS)
SHARED = MXCompressor("mxfp8_e4m3", scale_rule="ceil", scale_scope="shared")


@every_format
def test_bits_are_those_of_the_specification(name):
    report = measure_error(sample(4, 4 * 2560), MXCompressor(name), Ring())
    assert report.bits_per_entry == {"mxfp8": 8.25, "mxfp6": 6.25, "mxfp4": 4.25}[name[:5]]


@every_format
def test_a_payload_holds_the_blocks_with_entries(name):
    compressor = MXCompressor(name)
    encoding = compressor.encode(
        None, Layout(1000, 3, 256), Ring().schedule(3), Call(), compressor.next_state
    )
    each = 4 * ELEMENTS[name].bits + 1
    sizes = [encoding.payload_bytes(Message(c, 0, 1, 0), range(2)) for c in range(3)]
    # Chunks of 512, of 488 and of no entries.
    assert sizes == [16 * each, 16 * each, 0]
    assert encoding.payload_bytes(Message(1, 0, 1, 0), range(1, 2)) == 8 * each


@every_format
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_what_is_not_finite_spoils_its_block_of_32(name, value):
    """FP8 elements could say so of one entry; the scale says so of the block, in every format."""
    x = sample(3, 1000)
    x[1, 700] = value
    for topology in (Ring(), Butterfly()):
        out = all_reduce(MXCompressor(name), topology, x).outs[2]
        # Chunks have 512 entries: block 5 of the second one.
        spoilt = torch.zeros(1000, dtype=torch.bool)
        spoilt[512 + 160 : 512 + 192] = True
        assert torch.equal(out.isnan(), spoilt)
        assert out[~spoilt].isfinite().all()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "prescaled"])
@pytest.mark.parametrize("scope", ["per_hop", "shared"])
@every_format
def test_sums_beyond_float32_are_nan_and_means_are_not(name, scope, rounding):
    x = torch.full((4, 256), 0.9 * LARGEST)
    x[:, 64:] = 1.0
    compressor = MXCompressor(name, rounding=rounding, scale_scope=scope)
    total = all_reduce(compressor, Ring(), x).outs[0]
    mean = all_reduce(compressor, Ring(), x, call=Call(divisor=4)).outs[0]

    assert total[:64].isnan().all()
    assert total[64:].isfinite().all()
    assert mean.isfinite().all()
    assert (mean[:64] > 0.5 * LARGEST).all()


def test_entries_of_all_sizes_and_zeros_are_summed():
    x = torch.zeros(2, 256)
    x[:, 0] = 2.0**-149
    x[:, 32:64] = 2.0**-126
    x[0, 64:96] = 1.0
    x[1, 64:96] = -1.0
    out = all_reduce(MXCompressor(), Ring(), x).outs[0]

    # 2^-149 is below the half of the smallest step under the smallest scale, 2^-127 * 2^-10.
    assert out[0] == 0
    assert (out[32:64] == 2.0**-125).all()
    assert (out[64:] == 0).all()


def test_without_a_compiler_the_bits_are_the_same(monkeypatch):
    x = sample(3, 1000)
    for compressor in (MXCompressor(rounding="prescaled"), SHARED):
        built = all_reduce(compressor, Butterfly(), x)
        with monkeypatch.context() as patch:
            patch.setattr(ops, "_build", lambda values: None)
            plain = all_reduce(compressor, Butterfly(), x)
        assert built.payloads == plain.payloads
        assert same_bits(built.outs[0], plain.outs[0])


def test_shared_scales_leave_room_for_the_sum():
    """With μ = 1 equal entries of all ranks add up to the largest element at most."""
    x = sample(1, 2048).expand(4, 2048).contiguous()
    outcome = all_reduce(SHARED, Ring(), x)
    state = outcome.states[0]

    assert state.shared[MU] == 1.0
    scales = {message.hop: set() for message, _ in outcome.payloads}
    for (message, _), payload in outcome.payloads.items():
        scales[message.hop].add(payload[-16:] if message.chunk == 0 else b"")
    assert all(seen == scales[0] for seen in scales.values()), "one scale for all hops"
    largest = rounded_up_to_bfloat16(x.view(4, -1, 32)[0].abs().amax(1)) * 4
    quantizer = reference.Quantizer(ELEMENTS["mxfp8_e4m3"], "ceil")
    expected = reference.scale_of(largest.view(torch.int32), quantizer).to(torch.uint8)
    first = next(p for (m, _), p in outcome.payloads.items() if m.chunk == 0)
    assert first[-16:] == bytes(expected[:16].tolist())


def test_mu_grows_slowly_and_halves_on_saturation():
    """Entries of opposite signs: their sums stay far from what the head-room is for."""
    x = sample(4, 4096)
    x[1::2] = -x[::2]
    states, mus = None, []
    for number in range(5):
        outcome = all_reduce(SHARED, Ring(), x, call=Call(0, number), states=states)
        states = outcome.states
        mus.append(states[0].shared[MU].item())
        assert all(state.private[SATURATED] == 0 for state in states)
    assert mus == pytest.approx([RECOVERY**k for k in range(5)], rel=1e-6)

    # Much room given away: equal entries saturate now, and every rank takes note.
    for state in states:
        state.shared[MU].fill_(4.0)
    equal = x[:1].expand(4, -1).contiguous()
    saturating = all_reduce(SHARED, Ring(), equal, call=Call(0, 5), states=states)
    assert saturating.states[0].shared[MU] == 4.0
    assert saturating.states[0].private[SATURATED] > 1e-3
    after = all_reduce(SHARED, Ring(), x, call=Call(0, 6), states=saturating.states)
    assert [state.shared[MU].item() for state in after.states] == [2.0] * 4

    # Room for all n ranks is the most that is ever left.
    for state in states:
        state.shared[MU].fill_(1.0)
        state.private[SATURATED].fill_(1.0)
    least = all_reduce(SHARED, Ring(), x, call=Call(0, 7), states=states)
    assert [state.shared[MU].item() for state in least.states] == [1.0] * 4


def test_mu_is_agreed_upon_in_a_reduce_scatter():
    """One rank alone sees its slice saturate; in the next call all know."""
    x = torch.ones(4, 4096)
    x[:, 1024:] = 0.0
    states = all_reduce(SHARED, Ring(), x).states
    for state in states:
        state.shared[MU].fill_(4.0)
    bounds = (0, 1024, 2048, 3072, 4096)
    first = reduce_scatter(SHARED, Ring(), x, bounds, call=Call(0, 1), states=states)
    assert {state.shared[MU].item() for state in first.states} == {4.0}
    assert first.states[0].private[SATURATED] > 0
    second = reduce_scatter(SHARED, Ring(), x, bounds, call=Call(0, 2), states=first.states)
    assert {state.shared[MU].item() for state in second.states} == {2.0}


def test_a_call_that_is_not_finite_at_first_leaves_a_fresh_state():
    x = sample(3, 1000)
    x[2, 5] = nan
    states = all_reduce(SHARED, Ring(), x).states
    assert all((s.shared[MU], s.private[SATURATED]) == (1.0, 0.0) for s in states)

    for state in states:
        state.private[SATURATED].fill_(0.5)
    again = all_reduce(SHARED, Ring(), x, call=Call(0, 1), states=states).states
    assert all((s.shared[MU], s.private[SATURATED]) == (1.0, 0.5) for s in again)


def test_statistics_are_maxima_rounded_up():
    """So that what is sent as bfloat16 is exact, and no scale is too small."""
    x = sample(1, 1000)[0]
    x[3], x[40], x[70], x[100], x[130] = 0.0, nan, inf, LARGEST, -(2.0**-149)
    x[128:160] = 0.0
    x[130] = -(2.0**-149)
    statistics = SHARED.statistics(x, Layout(1000, 2, 256), Call(), State())
    values, exact = statistics.values, Layout(1000, 2, 256).pad(x, torch.float32)
    exact = exact.view(-1, 32).abs().amax(1)
    finite = exact.isfinite() & (exact < 2.0**127)

    assert (statistics.reduction, statistics.format) == ("max", "bf16")
    assert torch.equal(values.bfloat16().float()[2:], values[2:])
    assert (values[:-1] >= exact)[finite].all()
    assert (values[:-1] <= exact * (1 + 2.0**-7) + 2.0**-133)[finite].all()
    assert values[1].isnan()
    assert values[2] == inf
    assert values[3] == torch.finfo(torch.bfloat16).max
    assert values[4] == 2.0**-133
    assert values[-1] == 0


def test_only_shared_scales_have_a_state():
    assert not MXCompressor().stateful
    assert SHARED.stateful
    assert not SHARED.needs_key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("format", "mxfp8"),
        ("scale_rule", "round"),
        ("rounding", "correlated"),
        ("scale_scope", "global"),
    ],
)
def test_what_does_not_exist_is_refused(field, value):
    with pytest.raises(ConfigurationError, match=f"{field}='{value}'"):
        MXCompressor(**{field: value})


def test_real_gradients(gradients):
    """The band of MXFP8 on this kind of gradients, and more error with fewer bits."""
    errors = [
        measure_error(gradients, MXCompressor(name), Butterfly()).vnmse
        for name in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4_e2m1")
    ]
    assert errors == sorted(errors)
    assert 1e-3 < errors[0] < 6e-3


@pytest.mark.parametrize("bounds", [(0, 2048, 4096, 6144, 8192), (0, 0, 8192, 8192, 8192)])
def test_shared_maxima_are_those_of_blocks_with_entries(bounds):
    """However uneven the slices are: 2 bytes of statistics for each block, twice across."""
    x = sample(4, 8192)
    plain = MXCompressor("mxfp8_e4m3", scale_rule="ceil")
    sent = [sum(reduce_scatter(c, Ring(), x, bounds).bytes_sent) for c in (SHARED, plain)]
    assert 0 <= sent[0] - sent[1] - 2 * 3 * 2 * 8192 // 32 <= 100
