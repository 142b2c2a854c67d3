"""Descriptions are values: equal, hashable, frozen, written out in full."""

import json
import pickle
from typing import Literal

import pytest
from pydantic import ValidationError

from dynamiq.compressors.dynamiq import DynamiQCompressor
from dynamiq.compressors.feedback import ErrorFeedback
from dynamiq.compressors.omnireduce import OmniReduceCompressor
from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core.compressor import Compressor
from dynamiq.core.description import Description
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.registry import AnyCompressor, AnyTopology
from dynamiq.topologies import Butterfly, Direct, Ring
from tests.core.formats import FORMATS
from tests.probes import FloatPerHop, RotatedIntegers

DESCRIPTIONS = [*(f.compressor for f in FORMATS), Ring(), Butterfly(), Direct()]


class Nested(Description):
    """Every way in which a description may hold others."""

    kind: Literal["nested"] = "nested"
    one: AnyCompressor = Uncompressed()
    maybe: AnyCompressor | None = None
    several: tuple[AnyCompressor, ...] = ()
    over: AnyTopology = Ring()


class Careless(Description):
    """Its field is not of a type that reads descriptions back; it is written out all the same."""

    kind: Literal["careless"] = "careless"
    inner: Compressor = Uncompressed()


@pytest.mark.parametrize(
    "changed",
    [
        Nested(one=Uncompressed("bf16")),
        Nested(one=RotatedIntegers()),
        Nested(one=RotatedIntegers(top=99)),
        Nested(one=ErrorFeedback(Uncompressed())),
        Nested(one=ErrorFeedback(Uncompressed("bf16"))),
        Nested(several=(ErrorFeedback(Uncompressed()), ErrorFeedback(Uncompressed("bf16")))),
        Nested(maybe=Uncompressed()),
        Nested(maybe=Uncompressed("fp16")),
        Nested(several=(Uncompressed(),)),
        Nested(several=(Uncompressed(), Uncompressed())),
        Nested(several=(Uncompressed(), Uncompressed("bf16"))),
        Nested(several=(Uncompressed("bf16"), Uncompressed())),
        Nested(over=Butterfly()),
    ],
    ids=lambda d: json.dumps(d.to_dict()),
)
class TestNesting:
    def test_changes_the_digest(self, changed):
        assert changed.digest() != Nested().digest()

    def test_is_read_back(self, changed):
        again = Nested.model_validate(json.loads(json.dumps(changed.to_dict())))

        assert again == changed
        assert again.digest() == changed.digest()
        assert type(again.one) is type(changed.one)


def test_no_digest_is_blind_to_what_is_inside():
    inner = (Uncompressed(), Uncompressed("bf16"), RotatedIntegers(), RotatedIntegers(top=99))

    assert len({Careless(inner=c).digest() for c in inner}) == len(inner)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (
            lambda: Uncompressed("fp8"),
            "Uncompressed cannot be built with format='fp8': Input should be",
        ),
        (lambda: RotatedIntegers(top="many"), "RotatedIntegers cannot be built with top='many'"),
        (lambda: RotatedIntegers(top=1, bottom=0), "bottom=0"),
        (ErrorFeedback, "compressor="),
        (lambda: ErrorFeedback(Ring()), "compressor="),
        (lambda: DynamiQCompressor(epsilon_4=float("nan")), "epsilon_4=nan"),
        (lambda: DynamiQCompressor(bit_budget=float("inf")), "bit_budget=inf"),
        (
            lambda: OmniReduceCompressor(budget=4),
            "budget=4: .* its options are mode, payload, bit_budget$",
        ),
        (lambda: OmniReduceCompressor("topk"), "got 'topk' without a name; its options are mode, "),
        (lambda: Ring(3), "Ring got 3 without a name; its options are none"),
        (lambda: Ring(size=4), "size=4: .* its options are none$"),
        (lambda: Nested(several=(Uncompressed(), Ring())), r"several\.1"),
    ],
)
def test_what_cannot_be_built_is_a_configuration_error(build, problem):
    with pytest.raises(ConfigurationError, match=problem):
        build()


def test_all_these_differ():
    values = [
        Uncompressed(),
        Uncompressed("bf16"),
        RotatedIntegers(),
        RotatedIntegers(top=99),
        FloatPerHop(),
        FloatPerHop(formats=("bf16", "fp32", "fp8")),
        ErrorFeedback(FloatPerHop()),
        ErrorFeedback(FloatPerHop(formats=("bf16", "fp32", "fp8"))),
        Ring(),
        Butterfly(),
        DynamiQCompressor.paper(),
        DynamiQCompressor.paper(bit_budget=5.25),
        DynamiQCompressor.paper(widths=(2, 4)),
        DynamiQCompressor.paper(rounding="nearest"),
        DynamiQCompressor.paper(energy="raw"),
        DynamiQCompressor.paper(group_scales="up"),
        DynamiQCompressor.paper(epsilon_4=0.23),
        DynamiQCompressor.paper(epsilon_8=0.09),
    ]

    assert len({value.digest() for value in values}) == len(values)
    assert len(set(values)) == len(values)


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=repr)
class TestValues:
    def test_is_plain_json(self, description):
        written = description.to_dict()

        assert json.loads(json.dumps(written, allow_nan=False)) == json.loads(json.dumps(written))
        assert written["kind"] == description.kind

    def test_survives_writing_pickling_and_copying(self, description):
        copies = [
            type(description).model_validate(description.to_dict()),
            pickle.loads(pickle.dumps(description)),
            description.model_copy(deep=True),
        ]
        for copy in copies:
            assert copy == description
            assert hash(copy) == hash(description)
            assert copy.digest() == description.digest()

    def test_is_frozen(self, description):
        with pytest.raises(ValidationError, match="frozen"):
            description.kind = "other"

    def test_refuses_unknown_fields(self, description):
        for build in (type(description).model_validate, lambda d: type(description)(**d)):
            with pytest.raises(ConfigurationError, match=r"colour='red'.*not permitted"):
                build(description.to_dict() | {"colour": "red"})

    def test_has_a_digest_of_16_bytes(self, description):
        assert len(description.digest()) == 16


def test_a_digest_is_the_same_in_every_process():
    """It is compared between ranks: no hash seed, no memory address."""
    assert Ring().digest().hex() == "7a94426b2e14f228c014dfa7f287261d"
