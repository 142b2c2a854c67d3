"""What goes wrong, and what users read then: what was asked, what is there, what to do."""

import threading
import time
from typing import Any, Literal

import pytest
import torch

from dynamiq import (
    AgreementError,
    Butterfly,
    ClosedError,
    ConfigurationError,
    DynamiQCompressor,
    DynamiqError,
    ErrorFeedback,
    InputError,
    LoopbackTransport,
    NonFiniteError,
    PeerLostError,
    PeerTimeoutError,
    Pipeline,
    Ring,
    THCCompressor,
    TransportError,
    Uncompressed,
)
from tests.contracts.compressor import same_bits
from tests.integrations.worlds import build, rank_of, run_world, same
from tests.probes import AdaptiveFixedPoint

PAPER = DynamiQCompressor.paper()


def message(error):
    return str(error.value)


def alone(**options):
    """Return a pipeline of one rank."""
    return build(LoopbackTransport.world(1)[0], **options)


def assert_works(pipeline):
    x = torch.full((7,), 3.0)
    pipeline.all_reduce(x)
    assert same_bits(x, torch.full((7,), 3.0))


# What is not a description, or one that cannot be.

PARTS = (PAPER, Ring(), LoopbackTransport.world(1)[0])
ORDER = "the order is Pipeline(compressor, topology, transport)"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (
            (DynamiQCompressor, *PARTS[1:]),
            ["compressor must be a Compressor", "DynamiQCompressor()"],
        ),
        ((PARTS[0], Butterfly, PARTS[2]), ["topology must be a Topology", "call it: Butterfly()"]),
        ((*PARTS[:2], LoopbackTransport), ["transport must be a Transport", ORDER]),
        ((PARTS[1], PARTS[0], PARTS[2]), ["compressor must be a Compressor, got Ring(", ORDER]),
        ((PARTS[2], PARTS[1], PARTS[0]), ["compressor must be a Compressor", ORDER]),
        ((PARTS[0], PARTS[2], PARTS[1]), ["topology must be a Topology", ORDER]),
        (("dynamiq", *PARTS[1:]), ["compressor must be a Compressor, got 'dynamiq'", ORDER]),
        ((PARTS[0].to_dict(), *PARTS[1:]), ["compressor must be a Compressor", ORDER]),
        ((PARTS[0], None, PARTS[2]), ["topology must be a Topology, got None", ORDER]),
    ],
)
def test_parts_of_the_wrong_kind(parts, says):
    with pytest.raises(ConfigurationError) as error:
        Pipeline(*parts)
    for part in says:
        assert part in message(error)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", 1.5),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("min_numel", -1),
        ("start_step", -1),
        ("start_step", "later"),
        ("segments", 0),
        ("segments", "some"),
        ("compress_float64", "perhaps"),
        ("on_nonfinite", "ignore"),
        ("verify_every", 0),
        ("verify_every", 0.5),
        ("capture", 0),
    ],
)
def test_options_out_of_range(option, value):
    with pytest.raises(ConfigurationError, match="Pipeline cannot be built with") as error:
        Pipeline(*PARTS, **{option: value})
    assert f"{option}={value!r}" in message(error)


def test_options_that_do_not_exist():
    with pytest.raises(TypeError, match="bits"):
        Pipeline(*PARTS, bits=4)
    with pytest.raises(TypeError):
        Pipeline(*PARTS, 7)


# What cannot be reduced.


def sparse():
    return torch.eye(3).to_sparse()


REFUSED = {
    "a list": (lambda: [1.0], ["must be a torch.Tensor, got list"]),
    "nothing": (lambda: None, ["must be a torch.Tensor, got NoneType"]),
    "integers": (lambda: torch.ones(3, dtype=torch.int64), ["int64[3]", "convert it first"]),
    "booleans": (lambda: torch.ones(3, dtype=torch.bool), ["bool[3]", "is not float32"]),
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), ["float8_e4m3fn[3]", "is not"]),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), ["complex64", "view_as_real()"]),
    "sparse": (sparse, ["torch.sparse_coo", "to_dense()"]),
    "meta": (lambda: torch.ones(3, device="meta"), ["meta device", "no data"]),
    "expanded": (lambda: torch.ones(1, 4).expand(3, 4), ["strides (0, 1)", ".contiguous()"]),
    "overlapping": (lambda: torch.ones(9).as_strided((4, 3), (1, 1)), ["share memory"]),
    "a leaf": (
        lambda: torch.ones(3, requires_grad=True),
        ["requires grad", "reduce its .grad", "torch.no_grad()"],
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("background", [False, True])
def test_tensors_that_are_refused(kind, background):
    make, says = REFUSED[kind]
    pipeline = alone()
    with pytest.raises(InputError) as error:
        pipeline.all_reduce(make(), async_op=background)
    for part in says:
        assert part in message(error)
    with pytest.raises(InputError, match="output"):
        pipeline.reduce_scatter(make(), torch.ones(3))
    assert_works(pipeline)
    assert pipeline.metrics().calls == 1


@pytest.mark.parametrize("kind", ["a list", "integers", "complex", "sparse", "meta"])
def test_inputs_that_are_refused(kind):
    with pytest.raises(InputError, match="input"):
        alone().reduce_scatter(torch.empty(3), REFUSED[kind][0]())


@pytest.mark.parametrize("op", ["max", "avg", "MEAN", None, torch.distributed.ReduceOp.SUM])
def test_ops_that_do_not_exist(op):
    pipeline = alone()
    for call in (
        lambda: pipeline.all_reduce(torch.ones(3), op),
        lambda: pipeline.reduce_scatter(torch.ones(3), torch.ones(3), op),
    ):
        with pytest.raises(InputError, match="unknown op") as error:
            call()
        assert repr(op) in message(error)
        assert "there are 'mean', 'sum'" in message(error)
    assert_works(pipeline)


@pytest.mark.parametrize(
    ("out", "numel", "bounds", "says"),
    [
        (lambda: torch.empty(4), 9, None, ["9 entries", "2 equal slices", "pad the input"]),
        (lambda: torch.empty(4), 8, (0, 8), ["8 entries into 2 slices", "give 3"]),
        (lambda: torch.empty(4), 8, (0, 2, 4, 8), ["8 entries into 2 slices", "give 3"]),
        (lambda: torch.empty(4), 8, (0, 5, 9), ["8 entries into 2 slices", "from 0 to 8"]),
        (lambda: torch.empty(4), 8, (0, 4.0, 8), ["bounds must be integers"]),
        (lambda: torch.empty(4), 8, (), ["8 entries into 2 slices", "give 3"]),
        (
            lambda: torch.empty(3),
            8,
            (0, 4, 8),
            ["output has 3 entries, but the slice of rank", "has 4"],
        ),
        (lambda: torch.empty(4), 8, (-4, 0, 8), ["do not split 8 entries into 2 slices"]),
        (
            lambda: torch.empty(4),
            12,
            (0, 16, 12),
            ["do not split", "non-decreasing offsets from 0 to 12"],
        ),
        (
            lambda: torch.empty(4, dtype=torch.half),
            8,
            None,
            ["output is torch.float16", "must be alike"],
        ),
        (lambda: torch.empty(8)[::2], 8, None, ["output with strides (2,) must be contiguous"]),
    ],
)
def test_slices_that_do_not_fit(out, numel, bounds, says):
    """Nothing was sent and nothing is closed, on any rank."""

    def run(pipeline):
        with pytest.raises(InputError) as error:
            pipeline.reduce_scatter(out(), torch.ones(numel), bounds=bounds)
        assert_works(pipeline)
        return message(error)

    for text in run_world(run, 2):
        for part in says:
            assert part in text


def test_a_compressor_with_state_needs_a_key():
    pipeline = alone(compressor=AdaptiveFixedPoint())
    for background in (False, True):
        with pytest.raises(InputError, match="probe-adaptive carries state") as error:
            pipeline.all_reduce(torch.ones(5), async_op=background)
        assert "name the tensor with key=..." in message(error)
    pipeline.all_reduce(torch.ones(5), key="mine")
    assert pipeline.metrics().calls == 1


@pytest.mark.parametrize("rank", [0, 1024])
def test_too_many_ranks_are_refused_before_anything_is_sent(monkeypatch, rank):
    transport = LoopbackTransport.world(1025)[rank]
    posted = []
    monkeypatch.setattr(transport, "connect", lambda hello: [hello] * 1025)
    monkeypatch.setattr(transport, "post", lambda *args: posted.append(args))
    pipeline = build(transport, compressor=THCCompressor.uniform(20))
    for call in (lambda: pipeline.all_reduce(torch.ones(5)), pipeline.connect):
        with pytest.raises(ConfigurationError) as error:
            call()
        assert message(error) == (
            "sums of 1025 ranks reach 1074789375, and 2^30 is the limit; use fewer bits, or at "
            "most 1024 ranks"
        )
    assert not posted


@pytest.mark.parametrize("wrapped", [False, True])
def test_every_rank_refuses_too_many_ranks(monkeypatch, wrapped):
    def refuse(self, world_size):
        raise ConfigurationError(f"{world_size} ranks are too many")

    monkeypatch.setattr(Uncompressed, "check_world_size", refuse)
    compressor = ErrorFeedback(Uncompressed()) if wrapped else Uncompressed()
    errors = run_world(Pipeline.connect, 3, catch=True, compressor=compressor)
    assert [(type(e), str(e)) for e in errors] == [(ConfigurationError, "3 ranks are too many")] * 3


def test_a_cuda_graph_cannot_hold_a_call(monkeypatch):
    pipeline = alone()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    calls = [
        lambda: pipeline.all_reduce(torch.ones(3)),
        lambda: pipeline.reduce_scatter(torch.ones(3), torch.ones(3)),
        lambda: pipeline.ddp_hook(None, None),
    ]
    for call in calls:
        with pytest.raises(InputError, match="a CUDA graph is being captured") as error:
            call()
        assert "reduce outside of the captured region" in message(error)


# Ranks that differ.


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("seed", (1, 2)),
        ("min_numel", (0, 100)),
        ("start_step", (2, 3)),
        ("segments", (1, 2)),
        ("segments", (None, 1)),
        ("on_nonfinite", ("propagate", "raise")),
        ("verify_every", (None, 10)),
        ("topology", (Ring(), Butterfly())),
        ("compressor", (PAPER, DynamiQCompressor.paper(4))),
        ("compressor", (Uncompressed("fp32"), Uncompressed("bf16"))),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_ranks_with_different_configurations(field, values):
    """Every rank learns which field differs, where, and how; nobody hangs."""

    def run(pipeline):
        errors = []
        for _ in range(2):
            with pytest.raises(AgreementError) as error:
                pipeline.all_reduce(torch.ones(100))
            errors.append(error.value)
        assert errors[0] is errors[1], "later calls raise the first error again"
        return str(errors[0])

    texts = run_world(run, 3, of_rank=lambda rank: {field: values[rank == 2]})
    for text in texts:
        assert f"{field}: rank 0 has" in text
        assert "rank 2 has" in text
        assert "same arguments on every rank" in text
    assert len(set(texts)) == 1
    if field == "compressor" and values[0] is PAPER:
        assert '"bit_budget": 5.0' in texts[0]
        assert '"bit_budget": 4.0' in texts[0]


OTHERWISE = {
    "size": (lambda p: p.all_reduce(torch.ones(8)), "torch.float32[8]"),
    "dtype": (lambda p: p.all_reduce(torch.ones(9).half()), "torch.float16[9]"),
    "op": (lambda p: p.all_reduce(torch.ones(9), "sum"), 'all_reduce "sum"'),
    "key": (lambda p: p.all_reduce(torch.ones(9), key="mine"), "key 'mine'"),
    "collective": (
        lambda p: p.reduce_scatter(torch.ones(3), torch.ones(9)),
        "in slices [0, 3, 6, 9]",
    ),
}


@pytest.mark.parametrize("what", OTHERWISE)
@pytest.mark.parametrize("background", [False, True])
def test_ranks_in_different_calls(what, background):
    """At the hundredth call rank 1 does something else; the three ranks are each other's peers."""
    otherwise, words = OTHERWISE[what]

    def run(pipeline):
        for _ in range(99):
            pipeline.all_reduce(torch.ones(2))
        x = torch.arange(9.0)
        with pytest.raises(AgreementError) as error:
            if rank_of(pipeline) == 1:
                otherwise(pipeline)
            else:
                handle = pipeline.all_reduce(x, async_op=background)
                if handle is not None:
                    handle.wait()
        with pytest.raises(AgreementError) as again:
            pipeline.all_reduce(x)
        assert again.value is error.value
        return message(error), x

    for rank, (text, x) in enumerate(run_world(run, 3)):
        assert f"ranks are not in the same call: rank {rank} is in" in text
        assert '#99: all_reduce "mean" of torch.float32[9]' in text
        assert words in text
        assert "the same sizes, dtypes, ops and keys" in text
        assert torch.equal(x, torch.arange(9.0)), "the tensor was written to"


def test_ranks_in_different_calls_while_others_are_in_flight():
    """All calls end, with an error on every rank; a rank that is behind may only lose its peer."""

    def run(pipeline):
        handles = [pipeline.all_reduce(torch.ones(2000), async_op=True) for _ in range(9)]
        handles.append(pipeline.all_reduce(torch.ones(1 + rank_of(pipeline)), async_op=True))
        ends = []
        for handle in handles:
            try:
                ends.append(handle.wait(timeout_s=10))
            except DynamiqError as error:
                ends.append(error)
        return [ends[-1]]

    ends = [end for (end,) in run_world(run, 3)]
    assert all(isinstance(end, (AgreementError, TransportError, ClosedError)) for end in ends)
    assert any(isinstance(end, AgreementError) for end in ends)


def test_far_ranks_hear_of_a_disagreement_too():
    """On a ring of 5, the ranks next to the one that differs see why; the others lose a peer."""

    def run(pipeline):
        with pytest.raises(DynamiqError) as error:
            pipeline.all_reduce(torch.ones(8 if rank_of(pipeline) == 0 else 9))
        return type(error.value)

    kinds = run_world(run, 5)
    assert [kinds[r] for r in (4, 0, 1)] == [AgreementError] * 3
    assert {kinds[2], kinds[3]} == {PeerLostError}


# Peers that are not there.


@pytest.mark.parametrize("background", [False, True])
def test_a_peer_that_closes(background):
    """Who waits for it learns its rank and the call; everything in flight ends."""

    def run(pipeline):
        pipeline.all_reduce(torch.ones(100))
        if rank_of(pipeline) == 1:
            pipeline.close()
            return []
        errors = []
        handles = []
        with pytest.raises(DynamiqError) as error:
            for _ in range(3):
                handles.append(pipeline.all_reduce(torch.ones(100), async_op=background))
            for handle in handles:
                handle.wait()
        errors.append(error.value)
        for handle in filter(None, handles):
            with pytest.raises(DynamiqError) as error:
                handle.wait(timeout_s=10)
            errors.append(error.value)
        with pytest.raises(DynamiqError) as error:
            pipeline.all_reduce(torch.ones(5))
        assert error.value is errors[0]
        return errors

    first, nothing, last = run_world(run, 3)
    assert nothing == []
    for errors in (first, last):
        assert isinstance(errors[0], PeerLostError)
        assert "lost rank 1" in str(errors[0]) or "lost rank" in str(errors[0])
        assert "call 1 (all_reduce)" in str(errors[0])
    assert any("lost rank 1" in str(errors[0]) for errors in (first, last))


@pytest.mark.parametrize("background", [False, True])
def test_a_silent_peer(background):
    """Ends in an error that names the peer, the call and its part, after the timeout."""
    done = threading.Event()

    def run(pipeline):
        pipeline.connect()
        if rank_of(pipeline) == 1:
            done.wait(20)
            return None
        began = time.monotonic()
        with pytest.raises(PeerTimeoutError) as error:
            handle = pipeline.all_reduce(torch.ones(100), key="mine", async_op=background)
            if handle is not None:
                handle.wait()
        done.set()
        assert 0.25 < time.monotonic() - began < 10
        assert isinstance(error.value, TimeoutError)
        return message(error)

    text, _ = run_world(run, 2, timeout_s=0.3)
    for part in ("rank 0 waited 0.3 s", "from rank 1", "call 0 (mine), header", "raise timeout_s"):
        assert part in text


def test_a_rank_that_does_not_connect():
    def run(pipeline):
        if rank_of(pipeline) == 1:
            return None
        with pytest.raises(PeerTimeoutError) as error:
            pipeline.all_reduce(torch.ones(3))
        with pytest.raises(DynamiqError):
            pipeline.all_reduce(torch.ones(3))
        return message(error)

    text, _ = run_world(run, 2, timeout_s=0.3)
    assert "waited 0.3 s in connect for rank(s) 1" in text


class Breaking(Uncompressed):
    """Fails on one rank while it encodes, as a faulty format would."""

    kind: Literal["probe-breaking"] = "probe-breaking"

    def encode(self, *arguments: Any) -> Any:
        encoding = super().encode(*arguments)
        compress = encoding.compress

        def fail(work, message, *rest):
            if message.sender == 1:
                raise ZeroDivisionError("the format is broken")
            compress(work, message, *rest)

        encoding.compress = fail
        return encoding


@pytest.mark.parametrize("background", [False, True])
def test_an_error_of_a_format_arrives_as_itself(background):
    def run(pipeline):
        handle = pipeline.all_reduce(torch.ones(30), async_op=background)
        if handle is not None:
            handle.wait()

    errors = run_world(run, 3, compressor=Breaking(), timeout_s=5.0, catch=True)
    assert [type(e) for e in errors] == [PeerLostError, ZeroDivisionError, PeerLostError]
    assert str(errors[1]) == "the format is broken"
    assert any("lost rank 1" in str(errors[r]) for r in (0, 2))


@pytest.mark.parametrize("error_type", [AgreementError, PeerLostError])
def test_the_future_of_a_failed_call_raises_its_error(error_type):
    def run(pipeline):
        pipeline.connect()
        if rank_of(pipeline) == 1 and error_type is PeerLostError:
            pipeline.close()
            return
        numel = 5 + rank_of(pipeline)
        future = pipeline.all_reduce(torch.ones(numel), async_op=True).future()
        with pytest.raises(error_type):
            future.wait()
        with pytest.raises(error_type):
            future.value()

    run_world(run, 2)


def test_an_interrupted_call_closes_the_pipeline():
    """Later calls must not raise KeyboardInterrupt again, as if the user had pressed it twice."""

    def run(pipeline):
        if rank_of(pipeline) == 0:
            pipeline.transport.post = interrupt
            with pytest.raises(KeyboardInterrupt):
                pipeline.all_reduce(torch.ones(3))
            with pytest.raises(ClosedError, match="KeyboardInterrupt interrupted a call"):
                pipeline.all_reduce(torch.ones(3))
        else:
            with pytest.raises(PeerLostError):
                pipeline.all_reduce(torch.ones(3))

    def interrupt(*_):
        raise KeyboardInterrupt

    run_world(run, 2)


def test_closing_after_an_error_does_not_hide_it():
    def run(pipeline):
        with pytest.raises(AgreementError) as error:
            pipeline.all_reduce(torch.ones(3 + rank_of(pipeline)))
        pipeline.close()
        with pytest.raises(AgreementError) as again:
            pipeline.all_reduce(torch.ones(3))
        assert again.value is error.value

    run_world(run, 2)


def test_a_transport_belongs_to_one_pipeline():
    """A second pipeline on it is refused; the first one goes on."""

    def run(pipeline):
        assert_works(pipeline)
        with pytest.raises(TransportError, match="connected already"):
            build(pipeline.transport).all_reduce(torch.ones(3))
        x = torch.ones(3)
        pipeline.all_reduce(x, "sum")
        return x

    assert same(run_world(run, 2), torch.full((3,), 2.0))


# Values that are not finite, and not wanted.


@pytest.mark.parametrize("compressor", [Uncompressed("fp32"), PAPER], ids=lambda c: c.kind)
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_values_may_be_refused(value, background, compressor):
    """On every rank in the same call; the next call works."""

    def run(pipeline):
        x = torch.ones(900)
        if rank_of(pipeline) == 2:
            x[899] = value
        with pytest.raises(NonFiniteError) as error:
            handle = pipeline.all_reduce(x, key="bucket 7", async_op=background)
            if handle is not None:
                handle.wait()
        y = torch.full((900,), 2.0)
        pipeline.all_reduce(y, "sum")
        assert (y - 6.0).abs().max() < 2
        assert pipeline.metrics().calls == 2
        return message(error)

    for text in run_world(run, 3, compressor=compressor, on_nonfinite="raise"):
        for part in ("bucket 7", "holds a NaN or an infinity", "every rank raises this"):
            assert part in text


@pytest.mark.parametrize("compressor", [Uncompressed("fp32"), PAPER], ids=lambda c: c.kind)
def test_non_finite_values_of_one_slice_are_refused_on_every_rank(compressor):
    def run(pipeline):
        x, out = torch.ones(900), torch.empty(300)
        x[0] = torch.nan
        with pytest.raises(NonFiniteError):
            pipeline.reduce_scatter(out, x)
        pipeline.reduce_scatter(out, torch.ones(900))
        return out

    for out in run_world(run, 3, compressor=compressor, on_nonfinite="raise"):
        assert (out - 1).abs().max() < 0.5


def test_a_sum_that_overflows_is_not_finite():
    def run(pipeline):
        with pytest.raises(NonFiniteError, match="or the sum overflowed"):
            pipeline.all_reduce(torch.full((10,), 3e38), "sum")

    run_world(run, 2, on_nonfinite="raise")


def test_finite_values_raise_nothing():
    def run(pipeline):
        x = torch.full((500,), torch.finfo(torch.float32).max)
        pipeline.all_reduce(x, "mean")
        return x

    assert all(
        x.isfinite().all() for x in run_world(run, 3, on_nonfinite="raise", compressor=PAPER)
    )
