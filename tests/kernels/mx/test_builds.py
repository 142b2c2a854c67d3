"""Every build gives the reference's bits: any operation, element, rule, rounding and value."""

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import given
from torch import Tensor

from dynamiq.core.errors import InputError
from dynamiq.kernels import host
from dynamiq.kernels.mx import ops, reference
from dynamiq.kernels.mx.wire import ELEMENTS, Quantizer, Segment
from dynamiq.kernels.registry import kernels_of
from tests.kernels.devices import on
from tests.kernels.mx.operations import Call, call_of, calls


def everything(c: Call, module: ModuleType = ops) -> Iterator[tuple[str, Tensor]]:
    """Run every operation where the call's tensors are; yield what each wrote, by its kernel."""
    device = c.values.device
    memory = on(device, c.memory())
    payload = memory[:-16]
    module.compress(c.values, c.incoming, c.quantizer, payload)
    yield "mx_compress", memory
    for given_ in (payload, c.foreign):
        values, sums, memory = c.values.clone(), c.values.clone(), on(device, c.memory())
        module.decompress(given_, values, c.incoming, c.quantizer)
        yield "mx_decompress", values.view(torch.int32)
        module.decompress_accumulate(given_, sums, c.incoming, c.quantizer)
        yield "mx_decompress_accumulate", sums.view(torch.int32)
        both = (c.incoming, c.outgoing)
        module.decompress_accumulate_recompress(given_, c.values, both, c.quantizer, memory[:-16])
        yield "mx_decompress_accumulate_recompress", memory


def check_every_operation(call: Call) -> None:
    theirs = everything(call, reference)
    for (name, ours), (_, expected) in zip(everything(call), theirs, strict=True):
        assert torch.equal(ours, expected), name


@given(calls())
def test_the_build_gives_the_references_bits(call):
    assert host.library("mx", "FP32") is not None
    check_every_operation(call)


def every_code(name: str, rounding: str) -> Call:
    """Return a call whose foreign payload has every code under every scale."""
    element = ELEMENTS[name]
    codes = torch.arange(256 * 2**element.bits, dtype=torch.int32) % 2**element.bits
    scales = torch.arange(256, dtype=torch.int32).repeat_interleave(2**element.bits // 32 or 1)
    if element.bits == 4:
        codes = codes.view(256, 16).repeat(1, 2).view(-1)
    packed = torch.cat([reference.pack(codes, element.bits), scales.to(torch.uint8)])
    call = call_of(torch.zeros(codes.numel()), Quantizer(element, "floor", rounding))
    call.foreign = packed
    return call


@pytest.mark.parametrize("rounding", ["nearest", "prescaled"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_every_code_under_every_scale(name, rounding):
    check_every_operation(every_code(name, rounding))


def every_bfloat16(name: str, rounding: str) -> Call:
    """Return a call on all of them under scale 1, which is given: many saturate, none is lost."""
    x = torch.arange(2**16).to(torch.int32).bitwise_left_shift(16).view(torch.float32)
    finite = torch.where(x.isfinite(), x, 0.0)
    call = call_of(finite, Quantizer(ELEMENTS[name], "floor", rounding), scaled=True)
    call.incoming.scales.fill_(127)
    return call


@pytest.mark.parametrize("name", ELEMENTS)
def test_every_bfloat16_number_under_scale_one(name):
    for rounding in ("nearest", "stochastic"):
        check_every_operation(every_bfloat16(name, rounding))


def test_no_kernel_is_forgotten():
    call = call_of(torch.ones(300), Quantizer(ELEMENTS["mxfp4_e2m1"]))
    assert {name for name, _ in everything(call)} == {spec.name for spec in kernels_of("mx")}


CALL = call_of(torch.ones(300), Quantizer(ELEMENTS["mxfp6_e3m2"]), scaled=True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"values": CALL.values.double()}, "values must be contiguous float32 on cpu"),
        ({"values": CALL.values[:1]}, r"10 blocks of 32 are float32\[2, 256\].*got \[1, 256\]"),
        ({"values": torch.zeros(513)[1:].view(2, 256)}, "aligned to 16 bytes"),
        ({"values": CALL.values.to("meta")}, "run on cpu and cuda, got values on meta"),
        ({"payload": CALL.foreign[:-1]}, r"payload of 250 bytes.*got \[249\]"),
        ({"payload": torch.zeros(251).byte()[1:]}, "aligned to 16 bytes"),
        ({"payload": CALL.foreign.char()}, "a payload must be contiguous uint8"),
        ({"scales": torch.zeros(9).byte()}, "2 supergroups have 8 scales each, got"),
        ({"scales": torch.zeros(16)}, "scales must be contiguous uint8"),
    ],
)
@pytest.mark.parametrize("kernel", [spec.name for spec in kernels_of("mx")])
def test_what_kernels_could_not_read_is_refused(kernel, change, complaint):
    values = change.get("values", CALL.values)
    payload = change.get("payload", CALL.foreign)
    segment = Segment(10, 0, 1, change.get("scales", CALL.incoming.scales))
    q = CALL.quantizer
    run = {
        "mx_compress": lambda: ops.compress(values, segment, q, payload),
        "mx_decompress": lambda: ops.decompress(payload, values, segment, q),
        "mx_decompress_accumulate": lambda: ops.decompress_accumulate(payload, values, segment, q),
        "mx_decompress_accumulate_recompress": lambda: ops.decompress_accumulate_recompress(
            CALL.foreign, values, (segment, segment), q, payload
        ),
    }
    with pytest.raises(InputError, match=complaint):
        run[kernel]()


def test_a_fused_step_stays_on_its_blocks():
    there = Segment(10, 1, 1, CALL.incoming.scales)
    with pytest.raises(InputError, match=r"10 blocks from supergroup 0 .* 10 from 1 must be the"):
        ops.decompress_accumulate_recompress(
            CALL.foreign, CALL.values, (CALL.incoming, there), CALL.quantizer, CALL.foreign.clone()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ["nearest", "prescaled"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_a_gpu_reads_every_code_under_every_scale(name, rounding):
    check_on_a_gpu(every_code(name, rounding))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ELEMENTS)
def test_a_gpu_rounds_every_bfloat16_number(name):
    for rounding in ("nearest", "stochastic"):
        check_on_a_gpu(every_bfloat16(name, rounding))


@pytest.mark.gpu
@given(calls())
def test_a_gpu_gives_the_references_bits(call):
    check_on_a_gpu(call)


def check_on_a_gpu(call: Call) -> None:
    ours = everything(on("cuda", call))
    for (name, actual), (_, expected) in zip(ours, everything(call, reference), strict=True):
        assert torch.equal(actual.cpu(), expected), name
