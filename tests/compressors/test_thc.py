"""THC: what it loses is what its formula says, sums are exact, and ranges do not matter."""

from itertools import chain, pairwise
from math import ceil, inf, log2, nan
from statistics import NormalDist

import pytest
import torch

from dynamiq import (
    Butterfly,
    Call,
    ConfigurationError,
    ErrorFeedback,
    InputError,
    Layout,
    Message,
    Ring,
    THCCompressor,
    measure_error,
    vnmse,
)
from dynamiq.compressors.thc.compressor import CLAMPS, RECEIVER_TABLE
from dynamiq.compressors.thc.encoding import Work
from dynamiq.compressors.thc.geometry import Geometry, log_block_of
from dynamiq.core.compressor import State
from dynamiq.kernels.hadamard.operands import integer_dtype
from tests.contracts import compressor as contract
from tests.contracts.compressor import all_reduce, reduce_scatter, same_bits, sample

NORMAL = NormalDist()
UNIFORM, TABLE = THCCompressor.uniform(), THCCompressor.table()


def gaussian(ranks, numel, seed=0):
    return torch.randn(ranks, numel, generator=torch.Generator().manual_seed(seed))


def clamp_error(t):
    """Return C: what a standard normal number loses when it is clamped to ±t, squared."""
    return 2 * ((1 + t * t) * NORMAL.cdf(-t) - t * NORMAL.pdf(t))


def rounding_error(compressor):
    """Return Q: the variance of stochastic rounding within ±t, by integration over the cells."""
    t, g = compressor.clamp, compressor.granularity
    table = compressor.receiver_table or range(g + 1)
    count, total = 2000, 0.0
    for a, b in pairwise(table):
        y = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        normal = (a + (b - a) * y - g / 2) * (2 * t / g)
        density = torch.exp(-normal.square() / 2) / (2 * torch.pi) ** 0.5
        width = (b - a) * 2 * t / g
        total += float((density * y * (1 - y)).sum()) * width**3 / count
    return total


@pytest.mark.parametrize(
    "compressor",
    [
        UNIFORM,
        TABLE,
        THCCompressor.uniform(2, clamp=CLAMPS[1 / 128]),
        THCCompressor.uniform(8, clamp=1.0),
    ],
    ids=["uniform", "table", "2-bits", "clamped"],
)
def test_the_error_is_that_of_the_formula(compressor):
    """C + Q / n where all ranks hold the same, C + Q where they are independent."""
    lost, rounded = clamp_error(compressor.clamp), rounding_error(compressor)
    same, independent = gaussian(1, 1 << 16).expand(5, -1), gaussian(5, 1 << 16)
    error = measure_error(same, compressor, Ring()).vnmse
    assert error == pytest.approx(lost + rounded / 5, rel=0.1)
    error = measure_error(independent, compressor, Ring()).vnmse
    assert error == pytest.approx(lost + rounded, rel=0.1)


def test_shares_that_are_clamped():
    for share, t in CLAMPS.items():
        assert 2 * NORMAL.cdf(-t) == pytest.approx(share, rel=1e-3)


def test_the_rotation_makes_anything_gaussian():
    """One entry alone, or a constant, is as good as noise."""
    one = torch.zeros(5, 1 << 14)
    one[:, 77] = 1.0
    expected = clamp_error(UNIFORM.clamp) + rounding_error(UNIFORM) / 5
    # A single entry becomes ±1/128 everywhere: it is rounded, and never clamped.
    assert measure_error(one, UNIFORM, Ring()).vnmse < expected
    error = measure_error(contract.sample(5, 1 << 16, spread=3.0), UNIFORM, Ring()).vnmse
    assert error < clamp_error(UNIFORM.clamp) + rounding_error(UNIFORM)


@pytest.mark.parametrize("topology", [Ring(), Butterfly()], ids=lambda t: t.kind)
def test_fine_steps_are_exact(topology):
    """2^20 steps, and a clamp that never acts: relative errors of 1e-5."""
    compressor = THCCompressor.uniform(20, clamp=6.0)
    for ranks in (2, 7):
        x = gaussian(ranks, 50_000)
        exact = x.double().sum(0)
        result = measure_error(x, compressor, topology).result
        assert vnmse(result, exact) ** 0.5 < 1e-5
        assert (result - exact).abs().max() < 1e-5 * exact.norm()


@pytest.mark.parametrize("compressor", [UNIFORM, TABLE, THCCompressor.uniform(20)], ids=str)
def test_sums_of_1024_ranks_are_exact(compressor):
    """Every rank adds its largest integers: no width is too narrow at any hop."""
    n, g, chunk = 1024, compressor.granularity, 3
    layout = Layout(256 * n, n, 256)
    norms = torch.ones(Geometry.of(layout).blocks)
    encoding = compressor.encode(norms, layout, Ring().schedule(n), Call(), State())
    x = torch.ones(layout.numel)
    loaded = encoding.load(x, 0, x)
    assert loaded.codes.max() <= g
    dtype = torch.int32 if g > 30 else torch.int16
    assert loaded.codes.dtype == dtype, "the narrowest that holds g n"
    work = Work(torch.full((layout.numel,), g, dtype=dtype))
    everything = range(encoding.positions)
    previous, payload = None, None
    here = slice(chunk * 256, chunk * 256 + 256)
    for summed in range(1, n + 1):
        message = Message(chunk, summed - 1, summed, summed - 1)
        size = encoding.payload_bytes(message, everything)
        assert size == 256 * ceil(log2(g * summed + 1)) / 8
        work.codes[here] = g
        if previous is not None:
            encoding.decompress_accumulate(payload, work, previous, everything)
        assert (work.codes[here] == g * summed).all()
        payload, previous = torch.empty(size, dtype=torch.uint8), message
        encoding.compress(work, message, everything, payload)


def test_too_many_ranks_are_refused():
    layout = Layout(256 * 1025, 1025, 256)
    norms = torch.ones(Geometry.of(layout).blocks)
    schedule = Ring().schedule(1025)
    with pytest.raises(ConfigurationError, match=r"2\^30 is the limit; .* at most 1024 ranks"):
        THCCompressor.uniform(20).encode(norms, layout, schedule, Call(), State())


def test_powers_of_two_change_nothing():
    """Norms and the transform neither overflow nor vanish."""
    x = sample(3, 5000)
    result = measure_error(x, UNIFORM, Ring()).result
    for power in (-100, -60, 60, 120):
        scaled = measure_error(x * 2.0**power, UNIFORM, Ring()).result
        assert torch.equal(scaled, result * 2.0**power)


def test_denormal_numbers_are_summed():
    x = gaussian(4, 5000) * 2.0**-135
    assert 0 < x.abs().min() < 2.0**-140
    result = all_reduce(THCCompressor.uniform(8, clamp=5.0), Ring(), x).outs[0]
    # Squares that do not vanish in float64.
    assert vnmse(result.double() * 2.0**135, x.double().sum(0) * 2.0**135) < 1e-3


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float32, 3.4e38), (torch.bfloat16, 3.38e38), (torch.half, 65504)]
)
def test_means_of_the_largest_numbers_are_finite(dtype, largest):
    x = torch.full((4, 3000), largest, dtype=dtype)
    x[:, ::2] *= -1
    out = all_reduce(TABLE, Ring(), x, call=Call(divisor=4), out_dtype=dtype).outs[0]
    assert out.isfinite().all()
    assert vnmse(out, x[0]) < 0.1


@pytest.mark.parametrize("bounds", [None, (0, 100, 100, 900, 3000)])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_one_value_that_is_not_finite_spoils_the_bucket(bounds, value):
    x = sample(4, 3000)
    x[2, 50] = value
    outs = all_reduce(UNIFORM, Butterfly(), x, bounds=bounds).outs
    if bounds:
        outs += reduce_scatter(UNIFORM, Butterfly(), x, bounds).outs
    for out in outs:
        assert same_bits(out, torch.full_like(out, nan))


def test_a_reduce_scatter_gives_the_bits_of_an_all_reduce():
    x, bounds = sample(4, 40_000), (0, 9000, 9000, 30_001, 40_000)
    whole = all_reduce(UNIFORM, Ring(), x, bounds=bounds).outs[0]
    assert same_bits(torch.cat(reduce_scatter(UNIFORM, Ring(), x, bounds).outs), whole)


def test_topologies_give_the_same_bits():
    """Integers add up to the same in every order."""
    x = sample(7, 4000)
    results = [measure_error(x, UNIFORM, topology).result for topology in (Ring(), Butterfly())]
    assert same_bits(*results)


def test_padding_stays_under_a_sixteenth():
    for numel in [*range(4096, 9000, 7), 93_440, 10**6, 2**24 - 1, 2**24 + 1, 25 * 2**18]:
        log_block = log_block_of(numel)
        assert -numel % 2**log_block <= numel / 16
        assert -numel % 2 ** (log_block + 1) > numel / 16, "larger blocks would do"
    assert {log_block_of(numel) for numel in (1, 100, 256, 257)} == {8}
    assert log_block_of(511) == 9


def test_chunks_share_the_units():
    for numel, n, bounds in (
        (5000, 3, None),
        (100, 4, None),
        (5000, 4, (0, 10, 10, 4000, 5000)),
        (3000, 3, (0, 0, 3000, 3000)),
    ):
        layout = Layout(numel, n, 256, bounds)
        geometry = Geometry.of(layout)
        found = [list(geometry.units_of(c, range(geometry.positions))) for c in range(n)]
        assert list(chain(*found)) == list(range(geometry.units))
        halves = [range(geometry.positions // 2), range(geometry.positions // 2, 99_999)]
        for chunk, units in enumerate(found):
            assert units == [u for half in halves for u in geometry.units_of(chunk, half)]
            part = geometry.parts[chunk if bounds else 0]
            assert part.stop - part.start <= part.units * 256


def test_feedback_loses_nothing():
    """All results and what is still owed add up to all that was put in."""
    compressor = THCCompressor.uniform(3, clamp=1.5, error_feedback=True)
    exact, total, states = 0.0, 0.0, None
    for number in range(8):
        x = sample(3, 3000, seed=number, spread=0.5)
        outcome = all_reduce(compressor, Ring(), x, call=Call(0, number), states=states)
        states = outcome.states
        exact, total = exact + x.double().sum(0), total + outcome.outs[0].double()
    owed = sum(state.private["residual"].double() for state in states)
    assert owed.norm() > 0.02 * exact.norm()
    assert (total + owed - exact).norm() < 1e-5 * exact.norm()


def test_feedback_takes_the_bias_away():
    """What is clamped is missing in every call, and comes later with feedback."""
    x, calls = gaussian(4, 4096), 24
    exact, errors = x.double().sum(0), []
    for feedback in (False, True):
        compressor = THCCompressor.uniform(4, clamp=1.5, error_feedback=feedback)
        total, states = 0.0, None
        for number in range(calls):
            outcome = all_reduce(compressor, Ring(), x, call=Call(0, number), states=states)
            states = outcome.states if feedback else None
            total = total + outcome.outs[0].double()
        errors.append(vnmse(total / calls, exact))
    assert errors[1] < 0.1 * errors[0]


def test_feedback_is_kept_through_a_call_that_is_not_finite():
    compressor = THCCompressor.table(error_feedback=True)
    contract.a_non_finite_call_leaves_the_state_alone(compressor, Ring())
    assert compressor.needs_key
    assert not TABLE.needs_key


def test_feedback_of_another_size_is_refused():
    compressor = THCCompressor.uniform(error_feedback=True)
    states = all_reduce(compressor, Ring(), sample(2, 300)).states
    with pytest.raises(InputError, match="errors of 300 entries are kept; give tensors of diff"):
        all_reduce(compressor, Ring(), sample(2, 301), states=states)


def test_feedback_from_outside_is_refused():
    with pytest.raises(ConfigurationError, match="use THCCompressor\\(error_feedback=True\\)"):
        ErrorFeedback(UNIFORM)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"bits": 0}, "bits=0: Input should be greater than or equal to 1"),
        ({"bits": 21}, "bits=21: Input should be less than or equal to 20"),
        ({"clamp": 0.0}, r"clamp=0.0: Input should be greater than 0"),
        ({"clamp": inf}, "clamp=inf"),
        ({"receiver_table": (0, 3, 2)}, "ascends from 0 to less than 4096"),
        ({"receiver_table": (1, 2)}, "ascends from 0 to less than 4096"),
        ({"receiver_table": (0,)}, "ascends from 0 to less than 4096"),
        ({"receiver_table": (0, 5000)}, "ascends from 0 to less than 4096"),
        ({"receiver_table": (0, 1, 2)}, "codes of 4 bits need a receiver table of 16 integers"),
        ({"granularity": 15}, "granularity=15: Extra inputs"),
    ],
)
def test_options_are_checked(options, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        THCCompressor(**options)


def test_both_forms():
    assert (UNIFORM.granularity, TABLE.granularity) == (15, 30)
    assert TABLE.receiver_table == RECEIVER_TABLE
    assert THCCompressor(receiver_table=[0, 3], bits=1).granularity == 3


def test_the_working_buffer_is_the_narrowest_that_holds_the_sum():
    for ranks, dtype in ((17, torch.uint8), (18, torch.int16), (2184, torch.int16)):
        assert integer_dtype(15 * ranks) == dtype
    assert integer_dtype(15 * 2185) == torch.int32
    # Many entries are clamped to the largest sum, and would be far off if it did not fit.
    compressor, expected = THCCompressor.uniform(clamp=1.0), clamp_error(1.0)
    for ranks in (17, 18):
        x = gaussian(1, 4096).expand(ranks, -1)
        assert measure_error(x, compressor, Ring()).vnmse == pytest.approx(expected, rel=0.1)
