"""What every wire format must keep, as functions of a compressor and a topology.

``all_reduce`` and ``reduce_scatter`` run a whole world in this thread, with the code of a real
call. A law fails by an assertion. On two levels it is the format between nodes that is examined.
For a new format:

    @pytest.mark.parametrize("law", contract.LAWS, ids=contract.name)
    def test_contract(law):
        law(Mine(), Ring())

and, with what it promises about itself, the laws below ``LAWS``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, nan
from typing import Any, Literal

import torch
from pydantic import PrivateAttr
from torch import Tensor

from dynamiq.core.collective import Collective
from dynamiq.core.compressor import Compressor, Encoding, State, Statistics
from dynamiq.core.drivers import Meter, lockstep
from dynamiq.core.hierarchy import HierarchicalSchedule, on_levels
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.metrics import measure_error, vnmse
from dynamiq.core.registry import AnyCompressor, compressor_registry
from dynamiq.core.topology import Schedule, Topology

WORLD_SIZE = 4
NUMEL = 1193
"""Not a multiple of anything that formats treat as one."""
GUARD = 16
"""Bytes before and after a payload that nobody may touch; keeps its alignment."""


@dataclass(frozen=True)
class Outcome:
    """What one call left behind.

    Attributes:
        outs: Result of every rank: [d], or its slice.
        states: Next state of every rank.
        payloads: What was compressed: bytes by message, numbered as in the world, and positions.
        bytes_sent: Of every rank, headers and statistics included.
    """

    outs: list[Tensor]
    states: list[State]
    payloads: dict[tuple[Message, range], bytes]
    bytes_sent: list[int]


@dataclass(frozen=True)
class Setting:
    """How a call is made; the defaults are the plainest one."""

    call: Call = field(default_factory=Call)
    bounds: tuple[int, ...] | None = None
    segments: int = 1
    states: Sequence[State] | None = None
    fill: int = 0x5A
    by_parts: bool = False
    out_dtype: torch.dtype = torch.float32
    in_place: bool = False


def all_reduce(compressor: Compressor, topology: Topology, x: Tensor, **setting: Any) -> Outcome:
    """All-reduce the rows of x[n, d]; ``setting`` as in :class:`Setting`."""
    return _run(compressor, topology, x, Setting(**setting))


def reduce_scatter(
    compressor: Compressor, topology: Topology, x: Tensor, bounds: tuple[int, ...], **setting: Any
) -> Outcome:
    """Reduce-scatter the rows of x[n, d], rank r's slice being bounds[r] to bounds[r + 1]."""
    call = replace(setting.pop("call", Call()), gather=False)
    return _run(compressor, topology, x, Setting(call=call, bounds=bounds, **setting))


def _run(compressor: Compressor, topology: Topology, x: Tensor, s: Setting) -> Outcome:
    n, d = x.shape
    schedule = topology.schedule(n)
    columns = columns_of(schedule)
    logs = [Log() for _ in columns]
    meters = [Meter() for _ in range(n)]
    states = s.states or [State()] * n
    before = x.clone()
    outs, algorithms = [], []
    for rank in range(n):
        count = d if s.call.gather else s.bounds[rank + 1] - s.bounds[rank]
        row = before[rank].clone() if s.in_place else x[rank]
        outs.append(row if s.in_place else torch.full((count,), nan, dtype=s.out_dtype))
        spied = Spied(inner=compressor, fill=s.fill, by_parts=s.by_parts)
        spied.record(logs[rank % len(columns)])
        collective = Collective(
            spied,
            schedule,
            rank,
            d,
            s.call,
            bounds=s.bounds,
            segments=s.segments,
            state=states[rank],
        )
        algorithms.append(on_levels(collective).run(row, outs[rank]))
    with torch.no_grad():
        states = lockstep(algorithms, meters)
    assert same_bits(x, before), "the caller's tensor was written to"
    payloads = {
        (replace(m, chunk=column[m.chunk], sender=column[m.sender]), positions): payload
        for column, log in zip(columns, logs, strict=True)
        for (m, positions), payload in log.payloads.items()
    }
    return Outcome(outs, states, payloads, [meter.bytes_sent for meter in meters])


def columns_of(schedule: Schedule) -> list[range]:
    """Return the groups of ranks whose entries the format sums: on one level all of them."""
    if isinstance(schedule, HierarchicalSchedule):
        return [schedule.column(place) for place in schedule.node(0)]
    return [range(schedule.world_size)]


@dataclass
class Log:
    """What all ranks' encodings did."""

    payloads: dict[tuple[Message, range], bytes] = field(default_factory=dict)
    sizes: dict[tuple[Message, range], int] = field(default_factory=dict)


class Spied(Compressor):
    """A format under observation.

    Payloads are written into memory full of ``fill`` between two guards. Ranks must agree on
    every size, and a payload must not be written by whoever reads it.
    """

    kind: Literal["spied"] = "spied"
    inner: AnyCompressor
    fill: int
    by_parts: bool
    _log: Log = PrivateAttr(default_factory=Log)

    def record(self, log: Log) -> None:
        self._log = log

    @property
    def stateful(self) -> bool:
        return self.inner.stateful

    def unit(self, numel: int, world_size: int) -> int:
        return self.inner.unit(numel, world_size)

    def statistics(self, x: Tensor, layout: Layout, call: Call, state: State) -> Statistics | None:
        return self.inner.statistics(x, layout, call, state)

    def encode(
        self,
        statistics: Tensor | None,
        layout: Layout,
        schedule: Schedule,
        call: Call,
        state: State,
    ) -> "SpiedEncoding":
        inner = self.inner.encode(statistics, layout, schedule, call, state)
        return SpiedEncoding(inner, self._log, self.fill, self.by_parts)

    def next_state(self, encoding: "SpiedEncoding", work: Any) -> State:
        return self.inner.next_state(encoding.inner, work)


class SpiedEncoding(Encoding[Any]):
    def __init__(self, inner: Encoding[Any], log: Log, fill: int, by_parts: bool) -> None:
        self.inner, self.log, self.fill, self.by_parts = inner, log, fill, by_parts
        self.positions = inner.positions

    def payload_bytes(self, message: Message, positions: range) -> int:
        size = self.inner.payload_bytes(message, positions)
        agreed = self.log.sizes.setdefault((message, positions), size)
        assert size == agreed, f"{message}, {positions}: {size} bytes on one rank, {agreed} before"
        return size

    def load(self, x: Tensor, rank: int, out: Tensor) -> Any:
        return self.inner.load(x, rank, out)

    def compress(self, work: Any, message: Message, positions: range, out: Tensor) -> None:
        def write(inside: Tensor) -> None:
            self.inner.compress(work, message, positions, inside)

        self._write(write, message, positions, out)

    def decompress(self, payload: Tensor, work: Any, message: Message, positions: range) -> None:
        before = _check_aligned(payload).clone()
        self.inner.decompress(payload, work, message, positions)
        assert torch.equal(payload, before), "decompress wrote to the payload"

    def decompress_accumulate(
        self, payload: Tensor, work: Any, message: Message, positions: range
    ) -> None:
        before = _check_aligned(payload).clone()
        self.inner.decompress_accumulate(payload, work, message, positions)
        assert torch.equal(payload, before), "decompress_accumulate wrote to the payload"

    def decompress_accumulate_recompress(
        self,
        payload: Tensor,
        work: Any,
        incoming: Message,
        outgoing: Message,
        positions: range,
        out: Tensor,
    ) -> None:
        if self.by_parts:
            self.decompress_accumulate(payload, work, incoming, positions)
            self.compress(work, outgoing, positions, out)
            return
        before = _check_aligned(payload).clone()

        def write(inside: Tensor) -> None:
            self.inner.decompress_accumulate_recompress(
                payload, work, incoming, outgoing, positions, inside
            )

        self._write(write, outgoing, positions, out)
        assert torch.equal(payload, before), "the fused step wrote to the payload it read"

    def store(self, work: Any, out: Tensor, chunk: int | None = None) -> None:
        self.inner.store(work, out, chunk)

    def _write(
        self, write: Callable[[Tensor], None], message: Message, positions: range, out: Tensor
    ) -> None:
        size = self.payload_bytes(message, positions)
        memory = torch.full((GUARD + size + GUARD,), self.fill, dtype=torch.uint8)
        inside = memory[GUARD : GUARD + size]
        write(inside)
        for guard in (memory[:GUARD], memory[GUARD + size :]):
            assert (guard == self.fill).all(), f"{message}: wrote outside its {size} bytes"
        out.copy_(inside)
        assert (message, positions) not in self.log.payloads
        self.log.payloads[message, positions] = bytes(inside.numpy())


def _check_aligned(payload: Tensor) -> Tensor:
    """Check what allows a payload to be viewed as wider types, also by kernels."""
    assert payload.data_ptr() % GUARD == 0 or not payload.numel()
    assert payload.is_contiguous()
    return payload


def sample(
    world_size: int = WORLD_SIZE, numel: int = NUMEL, seed: int = 0, spread: float = 2.0
) -> Tensor:
    """Return float32[n, d] that looks like gradients: correlated ranks, very different scales."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randn(ceil(numel / 64), generator=generator).mul(spread).exp()
    scale = scale.repeat_interleave(64)[:numel]
    shared = torch.randn(numel, generator=generator)
    private = torch.randn(world_size, numel, generator=generator)
    return (0.5 * shared + private) * scale * 1e-3


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal in every bit, NaN payloads and signs of zeros too."""
    as_bytes = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


def assert_same(a: Outcome, b: Outcome, *, payloads: bool = True) -> None:
    """Compare results, states and (unless segments differ) payloads, bit for bit."""
    assert all(same_bits(x, y) for x, y in zip(a.outs, b.outs, strict=True)), "results differ"
    for x, y in zip(a.states, b.states, strict=True):
        assert_same_state(x, y)
    if payloads:
        assert a.payloads == b.payloads, "payloads differ"


def assert_same_state(a: State, b: State) -> None:
    """Compare two states bit for bit."""
    for x, y in ((a.shared, b.shared), (a.private, b.private)):
        assert x.keys() == y.keys()
        assert all(same_bits(x[name], y[name]) for name in x), "states differ"


def uneven_bounds(numel: int, world_size: int) -> tuple[int, ...]:
    """Return bounds with slices of very different sizes, the second one empty."""
    weights = [1 + (5 * i) % 7 for i in range(world_size)]
    weights[1 % world_size] = 0
    total = sum(weights) or 1
    offsets = [numel * sum(weights[:i]) // total for i in range(world_size)]
    return (*offsets, numel)


def every_rank_ends_with_the_same_bits(compressor: Compressor, topology: Topology) -> None:
    """Ranks that differ in one bit drift apart for ever."""
    for n in (2, 5):
        outs = all_reduce(compressor, topology, sample(n)).outs
        assert all(same_bits(out, outs[0]) for out in outs)


def every_rank_holds_the_same_shared_state(compressor: Compressor, topology: Topology) -> None:
    """It decides sizes, and is compared in the next call's header."""
    states = None
    for number in range(3):
        x = sample(seed=number) * 100.0**number
        states = all_reduce(compressor, topology, x, call=Call(0, number), states=states).states
        for column in columns_of(topology.schedule(WORLD_SIZE)):
            shared = [State(shared=states[rank].shared) for rank in column]
            for state in shared:
                assert_same_state(state, shared[0])
        assert compressor.stateful or states[0] == State()


def payloads_are_written_in_full(compressor: Compressor, topology: Topology) -> None:
    """Whatever was in the memory before, the same bytes are there afterwards."""
    x = sample()
    for run in _collectives(compressor, topology, x):
        assert_same(run(fill=0x00), run(fill=0xFF))


def the_fused_step_equals_its_parts(compressor: Compressor, topology: Topology) -> None:
    """The interface's default is the specification."""
    x = sample()
    for run in _collectives(compressor, topology, x):
        assert_same(run(), run(by_parts=True))


def segments_do_not_change_bits(
    compressor: Compressor, topology: Topology, numel: int = NUMEL
) -> None:
    """How a chunk is cut is a matter of speed."""
    for run in _collectives(compressor, topology, sample(numel=numel)):
        assert_same(run(), run(segments=5), payloads=False)
    run = _collectives(compressor, topology, sample(numel=31))[0]
    assert_same(run(), run(segments=1000), payloads=False)


def a_call_is_a_function_of_its_address(compressor: Compressor, topology: Topology) -> None:
    """The same seed and call number give the same bytes, from the same compressor or its copy."""
    x = sample()
    copy = compressor_registry.read(compressor.to_dict())
    assert copy == compressor
    assert copy.digest() == compressor.digest()
    once = all_reduce(compressor, topology, x, call=Call(3, 14))
    assert_same(once, all_reduce(copy, topology, x, call=Call(3, 14)))


def zeros_give_zeros(compressor: Compressor, topology: Topology) -> None:
    """Nothing is added to nothing."""
    for numel in (0, 1, 512, NUMEL):
        zeros = torch.zeros(WORLD_SIZE, numel)
        for run in _collectives(compressor, topology, zeros):
            assert all((out == 0).all() for out in run().outs)


def one_rank_gets_its_own_bits_back(compressor: Compressor, topology: Topology) -> None:
    """With nobody to talk to, nothing is encoded."""
    x = torch.tensor([[1.0, -0.0, nan, -inf, 1e-45, 3.4e38, 1 / 3]])
    outcome = all_reduce(compressor, topology, x)
    assert same_bits(outcome.outs[0], x[0])
    assert (outcome.payloads, outcome.bytes_sent) == ({}, [0])


def input_may_be_narrow_or_strided(compressor: Compressor, topology: Topology) -> None:
    """What counts is the values: dtype and strides of the input change no bit."""
    wide = sample(numel=2 * NUMEL)
    for gradients in (
        wide.bfloat16()[:, ::2],
        (wide[:, :NUMEL] * 64).half().T.contiguous().T,
        wide[:1, :NUMEL].expand(WORLD_SIZE, -1),
    ):
        plain = gradients.float().contiguous()
        results = [measure_error(g, compressor, topology).result for g in (gradients, plain)]
        assert same_bits(*results)


def output_may_be_narrow(compressor: Compressor, topology: Topology) -> None:
    """A result in the dtype of the gradients is the float32 result, rounded once."""
    x = sample()
    wide = all_reduce(compressor, topology, x).outs[0]
    for dtype in (torch.bfloat16, torch.float16):
        narrow = all_reduce(compressor, topology, x, out_dtype=dtype).outs[0]
        assert torch.equal(narrow, wide.to(dtype))


def every_nan_has_the_same_bits(compressor: Compressor, topology: Topology) -> None:
    """A narrow result's NaN is torch's own, whatever a machine's vector units make of casts."""
    for dtype, bits in ((torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00)):
        for numel in (33, 600):
            x = sample(numel=numel)
            x[1, 0] = nan
            out = all_reduce(compressor, topology, x, out_dtype=dtype).outs[0]
            found = out[out.isnan()].view(torch.int16)
            assert found.numel()
            assert (found == bits).all()


def input_may_be_the_output(compressor: Compressor, topology: Topology) -> None:
    """In place, the same bits."""
    x = sample()
    assert_same(
        all_reduce(compressor, topology, x), all_reduce(compressor, topology, x, in_place=True)
    )


def a_mean_is_as_good_as_a_sum(compressor: Compressor, topology: Topology) -> None:
    """Dividing by the number of ranks costs no accuracy."""
    x = sample()
    exact = x.double().sum(0)
    error = vnmse(all_reduce(compressor, topology, x).outs[0], exact)
    mean = all_reduce(compressor, topology, x, call=Call(divisor=WORLD_SIZE)).outs[0]
    assert vnmse(mean, exact / WORLD_SIZE) <= 1.5 * error + 1e-12


def every_rank_gets_its_slice(compressor: Compressor, topology: Topology) -> None:
    """A reduce-scatter gives each rank its own slice, about as exact as an all-reduce would."""
    for n, numel in ((2, 72), (4, 88), (3, 2100)):
        x = sample(n, numel)
        exact = x.double().sum(0)
        bounds = tuple(numel * r // n for r in range(n + 1))
        if numel > 88:
            bounds = uneven_bounds(numel, n)
        result = torch.cat(reduce_scatter(compressor, topology, x, bounds).outs)
        whole = all_reduce(compressor, topology, x, bounds=bounds).outs[0]
        assert vnmse(result, exact) <= 1.5 * vnmse(whole, exact) + 1e-12


LAWS: tuple[Callable[[Compressor, Topology], None], ...] = (
    every_rank_ends_with_the_same_bits,
    every_rank_holds_the_same_shared_state,
    payloads_are_written_in_full,
    the_fused_step_equals_its_parts,
    segments_do_not_change_bits,
    a_call_is_a_function_of_its_address,
    zeros_give_zeros,
    one_rank_gets_its_own_bits_back,
    input_may_be_narrow_or_strided,
    output_may_be_narrow,
    every_nan_has_the_same_bits,
    input_may_be_the_output,
    a_mean_is_as_good_as_a_sum,
    every_rank_gets_its_slice,
)


def sizes_are_free_of_data(compressor: Compressor, topology: Topology) -> None:
    """Byte counts are known before anything moves, so that no device is waited for."""
    x = sample()
    one_hot = torch.zeros_like(x)
    one_hot[1, 700] = 1.0  # alone in the bucket
    for bounds in (None, uneven_bounds(NUMEL, WORLD_SIZE)):
        sizes = [
            {address: len(payload) for address, payload in outcome.payloads.items()}
            for outcome in (
                all_reduce(compressor, topology, data, bounds=bounds)
                for data in (x, -1e20 * x.flip(1), one_hot)
            )
        ]
        assert all(other == sizes[0] for other in sizes)
        schedule = topology.schedule(WORLD_SIZE)
        if schedule.compressed_ranks < WORLD_SIZE:
            continue  # columns have layouts of their own; tests/planner/test_bytes.py looks at them
        layout = Layout(NUMEL, WORLD_SIZE, compressor.unit(NUMEL, WORLD_SIZE), bounds)
        known = compressor.sizes(layout, schedule, Call(), State())
        assert {address: known.payload_bytes(*address) for address in sizes[0]} == sizes[0]


def nothing_shares_randomness(compressor: Compressor, topology: Topology) -> None:
    """Another call, another seed, another sender, another chunk: each rounds otherwise."""
    x = sample()
    here, next_call, other_seed = (
        all_reduce(compressor, topology, x, call=call).payloads
        for call in (Call(0, 0), Call(0, 1), Call(1, 0))
    )
    assert here != next_call
    assert here != other_seed
    # The same values everywhere: only randomness can make messages of one hop differ.
    pattern = sample(1, 256).expand(WORLD_SIZE, 256).repeat(1, 2 * WORLD_SIZE)
    payloads = all_reduce(compressor, topology, pattern).payloads
    for hop in {message.hop for message, _ in payloads}:
        same_hop = [payload for (message, _), payload in payloads.items() if message.hop == hop]
        assert len(set(same_hop)) == len(same_hop), f"hop {hop}"


def the_error_is_at_most(compressor: Compressor, topology: Topology, bound: float) -> None:
    """vNMSE of a sum of a few ranks."""
    x = sample(4, 8192)
    for call in (Call(), Call(0, 1, 4)):
        out = all_reduce(compressor, topology, x, call=call).outs[0]
        assert vnmse(out, x.double().sum(0) / call.divisor) <= bound


def the_mean_error_vanishes(compressor: Compressor, topology: Topology, calls: int = 32) -> None:
    """The estimate is unbiased: the mean error of K calls has 1/K of one call's squared error.

    With a bias of b of the squared error the ratio is 1 + (K - 1) b; it scatters by about 3 %.
    """
    x = sample(3, 4096, spread=0.2)
    exact = x.double().sum(0)
    total, squares = torch.zeros_like(exact), torch.zeros_like(exact)
    for number in range(calls):
        outs = all_reduce(compressor, topology, x, call=Call(7, number)).outs
        error = outs[0].double() - exact
        total += error
        squares += error.square()
    ratio = (total.square().sum() / squares.sum()).item()
    assert abs(ratio - 1.0) < 0.12, ratio


def a_non_finite_entry_stays_where_it_is(
    compressor: Compressor, topology: Topology, unit: int | None, numel: int = NUMEL
) -> None:
    """A NaN or infinity shows on every rank, within ``unit`` entries, and nowhere else.

    Entries outside the unit are as good as without it. ``unit`` None is the whole bucket.
    """
    x = sample(numel=numel)
    exact = x.double().sum(0)
    clean = all_reduce(compressor, topology, x).outs[0].double()
    for value, rank, index in (
        (nan, WORLD_SIZE - 1, numel - 1),
        (-inf, 0, 512),
    ):
        broken = x.clone()
        broken[rank, index] = value
        outs = all_reduce(compressor, topology, broken).outs
        assert all(same_bits(out, outs[0]) for out in outs)
        _check_contamination(outs[0], exact, clean, index, unit)


def non_finite_stays_in_its_slice_of_a_reduce_scatter(
    compressor: Compressor, topology: Topology, unit: int | None
) -> None:
    """The same in a reduce-scatter, where only the slice's owner sees it; units begin there."""
    x = sample()
    exact = x.double().sum(0)
    bounds = uneven_bounds(NUMEL, WORLD_SIZE)
    start = bounds[2]
    index = start + (bounds[3] - start) // 2
    clean = torch.cat(reduce_scatter(compressor, topology, x, bounds).outs).double()
    x[3, index] = inf
    out = torch.cat(reduce_scatter(compressor, topology, x, bounds).outs)
    _check_contamination(out, exact, clean, index, unit, start)


def _check_contamination(
    out: Tensor, exact: Tensor, clean: Tensor, index: int, unit: int | None, start: int = 0
) -> None:
    assert not out[index].isfinite()
    if unit is None:
        return
    inside = torch.zeros(out.numel(), dtype=torch.bool)
    first = start + (index - start) // unit * unit
    inside[first : first + unit] = True
    assert out[~inside].isfinite().all()
    error = (out.double() - exact)[~inside].square().sum()
    usual = (clean - exact)[~inside].square().sum()
    assert error <= 2.0 * usual + 1e-12 * exact.square().sum()


def a_non_finite_call_leaves_the_state_alone(compressor: Compressor, topology: Topology) -> None:
    """One bad step must not poison what is kept for later ones."""
    x = sample()
    states = all_reduce(compressor, topology, x).states
    for value in (nan, inf):
        broken = x.clone()
        broken[3, 5] = value
        call = Call(0, 1)
        after = all_reduce(compressor, topology, broken, call=call, states=states).states
        for rank in columns_of(topology.schedule(WORLD_SIZE))[0]:  # all that meet the first entries
            assert_same_state(states[rank], after[rank])


def _collectives(
    compressor: Compressor, topology: Topology, x: Tensor
) -> list[Callable[..., Outcome]]:
    """Return an all-reduce and a reduce-scatter of x, which take a setting."""
    bounds = uneven_bounds(x.shape[1], x.shape[0])
    return [
        lambda **setting: all_reduce(compressor, topology, x, **setting),
        lambda **setting: reduce_scatter(compressor, topology, x, bounds, **setting),
    ]


def name(value: object) -> str | None:
    """Give a law's name as the id of a test."""
    return getattr(value, "__name__", None)
