"""The specification against ml_dtypes, torch and float64: all codes, all BF16 inputs, the edges."""

import numpy as np
import pytest
import torch

from dynamiq.kernels.mx import reference
from dynamiq.kernels.mx.wire import ELEMENTS, Quantizer, Segment, payload_bytes
from tests.kernels.mx import oracle

LARGEST = torch.finfo(torch.float32).max
TORCH = {"mxfp8_e4m3": torch.float8_e4m3fn, "mxfp8_e5m2": torch.float8_e5m2}

every_format = pytest.mark.parametrize("name", ELEMENTS)
every_rule = pytest.mark.parametrize("rule", ["floor", "ceil"])


def all_bfloat16():
    """Return all 65,536 of them, as float32."""
    return torch.arange(2**16).to(torch.int32).bitwise_left_shift(16).view(torch.float32)


def same(a, b):
    """Return whether NumPy arrays have the same bits, any NaN being as good as another."""
    nan = np.isnan(a)
    return np.array_equal(nan, np.isnan(b)) and a[~nan].tobytes() == b[~nan].tobytes()


def payload(x, quantizer, key=0):
    """Return the payload of x[blocks * 32]."""
    blocks = x.numel() // 32
    values = torch.zeros(-(-blocks // 8), 256)
    values.view(-1)[: x.numel()] = x.reshape(-1)
    out = torch.full((payload_bytes(quantizer.element, x.numel()),), 0x5A, dtype=torch.uint8)
    reference.compress(values, Segment(blocks, 0, key), quantizer, out)
    return out


def round_trip(x, quantizer, key=0):
    segment = Segment(x.numel() // 32, 0, key)
    return reference.decoded(payload(x, quantizer, key), segment, quantizer).view(-1)


@every_format
def test_every_code_stands_for_what_the_specification_says(name):
    codes = torch.arange(2 ** oracle.BITS[name], dtype=torch.int32)
    ours = reference.values_of_codes(codes, ELEMENTS[name])

    assert same(ours.numpy(), oracle.values(name))
    if name in TORCH:
        assert same(ours.numpy(), codes.to(torch.uint8).view(TORCH[name]).float().numpy())


@every_format
def test_the_table_is_that_of_the_specification(name):
    element = ELEMENTS[name]
    finite = oracle.magnitudes(name)

    assert element.bits == oracle.BITS[name]
    assert element.largest == finite[-1] == oracle.values(name)[element.top]
    assert 2.0**element.emax <= element.largest < 2.0 ** (element.emax + 1)
    assert finite[2**element.mantissa_bits] == 2.0**element.emin


@every_format
def test_all_bfloat16_inputs_are_rounded_to_nearest(name):
    x = all_bfloat16()
    x = x[x.isfinite()]
    ours = reference.nearest_codes(x, ELEMENTS[name]).to(torch.uint8)

    assert np.array_equal(ours.numpy(), oracle.codes(name, x.numpy()))
    if name in TORCH:
        top = oracle.largest(name)
        assert torch.equal(ours, x.clamp(-top, top).to(TORCH[name]).view(torch.uint8))


@every_format
def test_numbers_next_to_a_tie_are_rounded_once(name):
    """Float32 neighbours of all midpoints and levels: two roundings would show here."""
    finite = oracle.magnitudes(name)
    points = np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]).astype(np.float32)
    up, down = (np.nextafter(points, np.float32(end)) for end in (np.inf, -np.inf))
    y = np.concatenate([points, up, down])
    y = np.concatenate([y, -y])
    ours = reference.nearest_codes(torch.from_numpy(y), ELEMENTS[name])

    assert np.array_equal(ours.to(torch.uint8).numpy(), oracle.codes(name, y))


@every_format
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_rounding_is_total(name, rounding):
    element = ELEMENTS[name]
    y = torch.tensor([torch.inf, -torch.inf, torch.nan, LARGEST, -LARGEST, 2.0**-149, 0.0, -0.0])
    words = torch.full(y.shape, -1, dtype=torch.int32)
    if rounding == "nearest":
        codes = reference.nearest_codes(y, element)
    else:
        codes = reference.stochastic_codes(y, words, element)
    sign = 1 << (element.bits - 1)
    magnitude = codes & (sign - 1)

    assert magnitude[:5].eq(element.top).all()
    assert (codes[[1, 4, 7]] & sign).eq(sign).all()
    assert magnitude[6:].eq(0).all()


@every_format
def test_random_bits_round_up_as_often_as_the_distance_says(name):
    """Over all values of the upper 16 bits of a word, the mean is the number itself."""
    element = ELEMENTS[name]
    finite = oracle.magnitudes(name)
    shares = np.array([0.0, 2.0**-10, 0.3, 0.5, 0.99])
    y = (finite[:-1, None] + shares * np.diff(finite)[:, None]).astype(np.float32).ravel()
    words = (torch.arange(2**16, dtype=torch.int32) << 16) | 0x8000
    for number in y[:: max(1, len(y) // 40)]:
        at = torch.full(words.shape, float(number))
        codes = reference.stochastic_codes(at, words, element)
        rounded = reference.values_of_codes(codes, element).double()
        below = np.searchsorted(finite, number, side="right") - 1
        step = finite[min(below + 1, len(finite) - 1)] - finite[below]
        assert set(rounded.unique().tolist()) <= set(finite[below : below + 2])
        assert abs(rounded.mean().item() - float(number)) <= step * 2.0**-15
        negative = reference.stochastic_codes(-at, words, element)
        assert torch.equal(negative, codes + (1 << (element.bits - 1)))


@every_format
@every_rule
def test_scales_of_all_magnitudes(name, rule):
    """Every exponent of float32, with mantissas around the element's largest; denormals; zero."""
    quantizer = Quantizer(ELEMENTS[name], rule)
    ratio = oracle.largest(name) / 2.0 ** ELEMENTS[name].emax
    mantissas = np.float32([1.0, ratio, np.nextafter(np.float32(ratio), np.float32(2.0)), 1.999])
    normal = np.ldexp(mantissas[:, None].astype(np.float64), np.arange(-126, 128)).ravel()
    tops = np.float32([0.0, 2.0**-149, 3 * 2.0**-140, 2.0**-127, *normal, LARGEST])
    ours = reference.scale_of(torch.from_numpy(tops).view(torch.int32), quantizer)
    expected = [oracle.scale_byte(name, float(top), rule) for top in tops]

    assert ours.tolist() == expected


@every_format
@every_rule
def test_payloads_of_blocks_of_all_magnitudes(name, rule):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(300, 32, generator=generator)
    x *= 2.0 ** torch.randint(-160, 126, (300, 1), generator=generator)
    x[3], x[4], x[5] = 0.0, -0.0, 2.0**-149
    x[6, 1:] = 0.0
    x[7, 9], x[8, 0], x[9, 31] = torch.nan, torch.inf, -torch.inf
    x[10], x[11] = LARGEST, -LARGEST
    expected = oracle.encoded(name, x.numpy(), rule)
    out = payload(x, Quantizer(ELEMENTS[name], rule))
    read = oracle.read(name, out.numpy())

    assert np.array_equal(read.scales, expected.scales)
    assert np.array_equal(read.codes, expected.codes)
    decoded = round_trip(x, Quantizer(ELEMENTS[name], rule)).view(-1, 32).numpy()
    assert same(decoded, expected.decoded(name).astype(np.float32))
    assert np.isfinite(decoded[[*range(7), *range(10, 300)]]).all()
    assert np.isnan(decoded[7:10]).all()


@every_format
@pytest.mark.parametrize("byte", [0, 1, 127, 128, 253, 254, 255])
def test_every_scale_byte_is_read(name, byte):
    """Also those that our encoder never writes: 254, and whatever an FP8 element may say."""
    element = ELEMENTS[name]
    data = torch.randint(256, (payload_bytes(element, 256),), generator=torch.manual_seed(byte))
    data = data.to(torch.uint8)
    data[-8:] = byte
    decoded = reference.decoded(data, Segment(8, 0, 0), Quantizer(element))
    with np.errstate(over="ignore"):
        expected = oracle.read(name, data.numpy()).decoded(name).astype(np.float32)

    assert same(decoded.numpy(), expected)
    assert (byte == 255) == bool(decoded.isnan().all())


@every_format
@every_rule
@pytest.mark.parametrize("rounding", ["stochastic", "prescaled"])
def test_a_block_is_unbiased_unless_it_saturates(name, rule, rounding):
    """Mean over many blocks; the largest entry is nearly 2^k, where floor saturates."""
    ramp = torch.linspace(-1.99, 1.99, 32) * torch.cat([torch.ones(16), torch.full((16,), 0.1)])
    x = torch.stack([ramp * 2.0**e for e in (-3, 40, 0, -100)]).view(-1)
    many = round_trip(x.repeat(400), Quantizer(ELEMENTS[name], rule, rounding))
    results = many.view(400, -1).double()
    error = results.mean(0) - x
    deviation = results.std(0) / 20
    # What is rounded up once in a thousand calls may never be in these.
    rare = 0.004 * x.view(-1, 32).abs().amax(1).repeat_interleave(32)
    within = (error.abs() <= 5 * deviation + rare).all()
    saturates = rule == "floor" and rounding == "stochastic"

    assert within.item() == (not saturates)


@every_format
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "prescaled"])
def test_the_largest_numbers_stay_finite_and_their_sums_do_not(name, rounding):
    quantizer = Quantizer(ELEMENTS[name], "ceil", rounding)
    x = torch.full((256,), LARGEST)
    x[32:64] = 1.0
    for key in range(20):
        assert round_trip(x, quantizer, key).isfinite().all()
    values, segment = x.view(1, 256).clone(), Segment(8, 0, 1)
    sent = payload(x, quantizer)
    out = torch.empty_like(sent)
    reference.decompress_accumulate_recompress(sent, values, (segment, segment), quantizer, out)
    after = reference.decoded(out, segment, quantizer)

    assert out[-8:].tolist() == [255, int(out[-7]), *[255] * 6]
    assert after[0].isnan().all()
    assert after[1].isfinite().all()


def test_prescaling_is_undone_by_the_float32_next_to_four_thirds():
    assert float(np.float32(4 / 3)) == reference.UNDO_PRESCALE


def test_given_scales_are_used():
    element = ELEMENTS["mxfp6_e2m3"]
    x = torch.ones(1, 256)
    x[0, 33], x[0, 64] = torch.nan, 1e9
    scales = torch.tensor([127, 127, 127, 120, 200, 255, 0, 126], dtype=torch.uint8)
    out = torch.empty(payload_bytes(element, 256), dtype=torch.uint8)
    reference.compress(x, Segment(8, 0, 0, scales), Quantizer(element), out)
    decoded = reference.decoded(out, Segment(8, 0, 0, scales), Quantizer(element))

    assert out[-8:].tolist() == [127, 255, 127, 120, 200, 255, 0, 126]
    assert decoded[2, 0] == 7.5
    assert decoded[3].eq(7.5 * 2.0**-7).all()
    assert decoded[4].eq(0).all()
    assert decoded[6].eq(7.5 * 2.0**-127).all()
    assert decoded[7].eq(1.0).all()


@every_format
@pytest.mark.parametrize(("rule", "theirs"), [("floor", "FLOOR"), ("ceil", "RCEIL")])
def test_torchao_gives_the_same_codes_and_scales(name, rule, theirs):
    """Its cast, whole tensors. Its CEIL is another rule, and its smallest scale is 2^-126."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    others = {"mxfp4_e2m1": torch.float4_e2m1fn_x2}
    others |= {"mxfp6_e3m2": "fp6_e3m2", "mxfp6_e2m3": "fp6_e2m3"}
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 32, generator=generator)
    x *= 2.0 ** torch.randint(-110, 120, (4096, 1), generator=generator)
    x[0] = 0.0
    if rule == "floor":
        x[1] = LARGEST
    scales, codes = to_mx(x, (TORCH | others)[name], 32, ScaleCalculationMode[theirs])
    read = oracle.read(name, payload(x, Quantizer(ELEMENTS[name], rule)).numpy())
    found = codes.view(torch.uint8).numpy().reshape(4096, -1)
    if name == "mxfp4_e2m1":
        found = np.stack([found & 15, found >> 4], 2).reshape(4096, 32)

    assert np.array_equal(read.scales, scales.view(torch.uint8).view(-1).numpy())
    assert np.array_equal(read.codes, found)
