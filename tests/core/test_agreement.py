"""Ranks that are not in the same call find out before any payload moves."""

import json

import pytest
import torch

from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core import agreement
from dynamiq.core.agreement import DESCRIPTION_BYTES, HEADER_BYTES, Header
from dynamiq.core.collective import Collective, Post
from dynamiq.core.compressor import State
from dynamiq.core.drivers import lockstep
from dynamiq.core.errors import AgreementError
from dynamiq.core.message import Call
from dynamiq.topologies import Butterfly, Direct, Ring
from tests.probes import AdaptiveFixedPoint


class TestHeader:
    def test_is_16_bytes_and_begins_with_the_call_number(self):
        packed = Header(0x01020304, "x").pack()

        assert packed.dtype == torch.uint8
        assert packed.numel() == HEADER_BYTES == 16
        assert packed[:4].tolist() == [4, 3, 2, 1]

    def test_call_numbers_may_exceed_32_bits(self):
        assert torch.equal(Header(2**32 + 5, "x").pack(), Header(5, "x").pack())

    def test_is_the_same_for_equal_calls(self):
        assert torch.equal(Header(3, "sum", b"abc").pack(), Header(3, "sum", b"abc").pack())

    @pytest.mark.parametrize(
        "other",
        [
            Header(4, "sum of float32[10]", b"state"),
            Header(3, "sum of float32[11]", b"state"),
            Header(3, "sum of float32[10]", b"State"),
            Header(3, "sum of float32[10]"),
            Header(3, "sum of float32[10]s", b"tate"),
        ],
        ids=repr,
    )
    def test_differs_when_anything_differs(self, other):
        assert not torch.equal(Header(3, "sum of float32[10]", b"state").pack(), other.pack())

    def test_explains_itself_in_a_fixed_number_of_bytes(self):
        for text in ("short", "long" * 1000, "é" * 1000):
            explanation = Header(3, text, b"\x01\x02").explain()
            assert explanation.dtype == torch.uint8
            assert explanation.numel() == DESCRIPTION_BYTES

    def test_an_error_quotes_both_explanations(self):
        mine, theirs = Header(3, "sum of float32[10]"), Header(4, "é" * 1000, b"\xab" * 16)
        error = agreement.disagreement(1, mine.explain(), 2, theirs.explain())

        assert isinstance(error, AgreementError)
        assert "rank 1 is in #3: sum of float32[10], but rank 2 is in #4: ééé" in str(error)


class TestStateDigest:
    def test_of_nothing_is_nothing(self):
        assert agreement.state_digest(State()) == b""

    def test_does_not_see_what_is_private(self):
        shared = {"bits": torch.tensor(5)}

        assert agreement.state_digest(
            State(shared, {"lost": torch.ones(3)})
        ) == agreement.state_digest(State(shared))

    def test_does_not_depend_on_the_order_of_insertion(self):
        a, b = torch.tensor(1.0), torch.tensor(2.0)

        assert agreement.state_digest(State({"a": a, "b": b})) == agreement.state_digest(
            State({"b": b, "a": a})
        )

    def test_differs_when_a_name_type_shape_or_bit_differs(self):
        states = [
            {"a": torch.tensor([1.0, 2.0])},
            {"b": torch.tensor([1.0, 2.0])},
            {"a": torch.tensor([1.0, 2.0000002])},
            {"a": torch.tensor([1.0, 2.0]).double()},
            {"a": torch.tensor([1.0, 2.0]).bfloat16()},
            {"a": torch.tensor([[1.0, 2.0]])},
            {"a": torch.tensor([1, 2])},
            {"a": torch.tensor(0.0)},
            {"a": torch.tensor(-0.0)},
            {"a": torch.tensor([])},
            {"a": torch.tensor([True, False])},
            {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([])},
        ]

        assert len({agreement.state_digest(State(shared)) for shared in states}) == len(states)

    def test_sees_values_not_strides(self):
        wide = torch.arange(6.0).view(2, 3)

        assert agreement.state_digest(State({"a": wide.T})) == agreement.state_digest(
            State({"a": wide.T.contiguous()})
        )


def outcomes(calls, topology, states=None):
    """Run ranks whose descriptions are ``calls``; return each rank's result or error.

    ``None`` stands for a rank that agreed with its peers and was left waiting by a rank that did
    not; with a transport that wait would end in an error.
    """
    n = len(calls)
    results = [None] * n
    posted = [[] for _ in range(n)]
    inputs = [torch.full((8,), float(rank)) for rank in range(n)]

    def run(rank, collective):
        algorithm = collective.run(inputs[rank], inputs[rank])
        value = None
        try:
            while True:
                request = algorithm.send(value)
                if isinstance(request, Post):
                    posted[rank].append(request)
                value = yield request
        except StopIteration as end:
            results[rank] = end.value
        except AgreementError as error:
            results[rank] = error

    compressor = Uncompressed() if states is None else AdaptiveFixedPoint()
    collectives = [
        Collective(
            compressor,
            topology.schedule(n),
            rank,
            8,
            Call(number=number),
            description=text,
            state=State() if states is None else states[rank],
        )
        for rank, (number, text) in enumerate(calls)
    ]
    try:
        lockstep([run(rank, collective) for rank, collective in enumerate(collectives)])
    except AgreementError:
        assert None in results or any(isinstance(r, AgreementError) for r in results)
    return results, posted, inputs


every_topology = pytest.mark.parametrize(
    "topology", [Ring(), Butterfly(), Direct()], ids=lambda t: t.kind
)


@every_topology
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("odd_one", [0, 1])
def test_every_rank_that_differs_names_both_calls(topology, world_size, odd_one):
    calls = [(3, "the usual call")] * world_size
    calls[odd_one] = (4, "another call")
    results, posted, inputs = outcomes(calls, topology)

    for rank, error in enumerate(results):
        # Among 2 or 3 ranks, everyone is a peer of everyone.
        assert isinstance(error, AgreementError), f"rank {rank}"
        assert "#3: the usual call" in str(error)
        assert "#4: another call" in str(error)
        assert f"rank {rank} is in #{calls[rank][0]}" in str(error)
        assert f"rank {odd_one} is in #4" in str(error)
        assert "Nothing was sent or written" in str(error)
        assert torch.equal(inputs[rank], torch.full((8,), float(rank))), "input was overwritten"
        assert {p.nbytes for p in posted[rank]} == {HEADER_BYTES, DESCRIPTION_BYTES}


@every_topology
def test_all_ranks_may_differ_from_all_others(topology):
    results, _, _ = outcomes([(0, f"call of rank {rank}") for rank in range(3)], topology)

    for rank, error in enumerate(results):
        assert f"rank {rank} is in #0: call of rank {rank}" in str(error)


def test_ranks_out_of_sight_are_left_waiting_not_misled():
    """On a ring of 5, ranks 0 and 2 see that rank 1 differs; 3 and 4 see no difference."""
    calls = [(3, "x"), (4, "x"), (3, "x"), (3, "x"), (3, "x")]
    results, _, inputs = outcomes(calls, Ring())

    assert [isinstance(result, AgreementError) for result in results] == [True] * 3 + [False] * 2
    assert results[3:] == [None, None]
    assert all(torch.equal(x, torch.full((8,), float(rank))) for rank, x in enumerate(inputs))


@every_topology
def test_a_different_shared_state_is_a_different_call(topology):
    states = [State({"bytes": torch.tensor(1 + (rank == 1))}) for rank in range(3)]
    results, _, _ = outcomes([(3, "x")] * 3, topology, states)

    assert all(isinstance(error, AgreementError) for error in results)
    assert all(", state " in str(error) for error in results)


@every_topology
def test_equal_calls_go_on(topology):
    results, _, inputs = outcomes([(3, "x")] * 4, topology)

    assert results == [State()] * 4
    assert all(torch.equal(x, torch.full((8,), 6.0)) for x in inputs)


def test_the_header_is_posted_before_the_statistics_are_computed():
    """So that the slowest rank's computation does not delay the comparison on the others."""
    events = []

    class Watched(AdaptiveFixedPoint):
        def statistics(self, x, layout, call, state):
            events.append("statistics")
            return super().statistics(x, layout, call, state)

    collective = Collective(Watched(), Ring().schedule(3), 0, 8, Call())
    algorithm = collective.run(torch.ones(8), torch.empty(8))
    request = algorithm.send(None)
    while isinstance(request, Post):
        events.append(request.nbytes)
        request = algorithm.send("ticket")

    assert events == [HEADER_BYTES, HEADER_BYTES, "statistics"]


class TestHellos:
    def hello(self, **fields):
        return json.dumps({"seed": 0, "compressor": {"kind": "uncompressed"}} | fields).encode()

    def test_equal_ones_pass(self):
        agreement.check_hellos([self.hello()] * 4)
        agreement.check_hellos([self.hello()])

    def test_differing_fields_are_named_with_ranks_and_values(self):
        hellos = [self.hello(), self.hello(), self.hello(seed=1, extra=None)]

        with pytest.raises(AgreementError, match="seed: rank 0 has 0, rank 2 has 1; build"):
            agreement.check_hellos(hellos)

    def test_nested_differences_are_found(self):
        hellos = [self.hello(), self.hello(compressor={"kind": "uncompressed", "format": "bf16"})]

        with pytest.raises(AgreementError, match=r'compressor: rank 0 has .*rank 1 has .*"bf16"'):
            agreement.check_hellos(hellos)

    def test_a_field_that_one_rank_lacks_is_a_difference(self):
        with pytest.raises(AgreementError, match="segments: rank 0 has null, rank 1 has 2"):
            agreement.check_hellos([self.hello(), self.hello(segments=2)])

    def test_thousands_of_differences_are_a_short_message(self):
        hellos = [self.hello(seed=rank) for rank in range(1000)]

        with pytest.raises(AgreementError, match=r"\(and 994 more\)") as caught:
            agreement.check_hellos(hellos)
        assert len(str(caught.value)) < 500
