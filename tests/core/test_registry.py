"""Kind → class, and what other packages bring."""

from typing import Literal

import pytest

from dynamiq.compressors.dynamiq import DynamiQCompressor
from dynamiq.compressors.uncompressed import Uncompressed
from dynamiq.core import registry
from dynamiq.core.errors import ConfigurationError, RegistryError
from dynamiq.core.registry import Registry, compressor_registry, topology_registry
from dynamiq.core.topology import Topology
from dynamiq.topologies import Butterfly, Ring


class Star(Topology):
    """A topology of another package; its schedules do not matter here."""

    kind: Literal["acme-star"] = "acme-star"
    rays: int = 5

    def hops(self, world_size):
        return ()

    def steps(self, world_size, rank):
        return ()


class Impostor(Star):
    """Forgot to choose a kind of its own."""


class EntryPoint:
    """What importlib.metadata gives for an installed package."""

    def __init__(self, cls):
        self.cls = cls
        self.loaded = 0

    def load(self):
        self.loaded += 1
        return self.cls


@pytest.fixture
def topologies():
    fresh = Registry("dynamiq.topologies")
    fresh.register(Ring)
    fresh.register(Butterfly)
    return fresh


@pytest.fixture
def installed(monkeypatch):
    """Entry points by group, as if packages were installed."""
    groups = {}
    monkeypatch.setattr(registry, "entry_points", lambda group: groups.get(group, ()))
    return groups


def test_a_description_is_read_back_as_its_class(topologies):
    topologies.register(Star)

    assert topologies.read({"kind": "acme-star", "rays": 7}) == Star(rays=7)
    assert topologies.read(Star(rays=7).to_dict()) == Star(rays=7)
    assert topologies.get("ring") is Ring


def test_a_description_is_passed_through(topologies):
    star = Star()

    assert topologies.read(star) is star


def test_registering_again_is_fine(topologies):
    assert topologies.register(Ring) is Ring
    assert topologies.get("ring") is Ring


def test_two_classes_of_one_kind_are_an_error_that_names_both(topologies):
    topologies.register(Star)

    with pytest.raises(RegistryError, match=r"Impostor asks.*'acme-star'.*Star already has"):
        topologies.register(Impostor)
    assert topologies.get("acme-star") is Star


@pytest.mark.parametrize("annotation", [str, Literal["a", "b"]])
def test_a_kind_needs_a_default(topologies, annotation):
    class Nameless(Star):
        kind: annotation

    with pytest.raises(RegistryError, match="must be a Literal with a default"):
        topologies.register(Nameless)


def test_an_unknown_kind_is_an_error_that_lists_what_there_is(topologies, installed):
    with pytest.raises(RegistryError, match="'hypercube'; there are butterfly, ring; install"):
        topologies.read({"kind": "hypercube"})


def test_an_empty_registry_says_so(installed):
    with pytest.raises(RegistryError, match="there are none"):
        Registry("dynamiq.topologies").get("ring")


def test_a_mapping_without_a_kind_is_refused(topologies):
    with pytest.raises(RegistryError, match=r"needs a 'kind', got \{'rays': 5\}"):
        topologies.read({"rays": 5})


@pytest.mark.parametrize("value", ["ring", None, 5, Ring])
def test_what_is_no_description_is_refused(topologies, value):
    with pytest.raises(RegistryError, match="is a mapping, got"):
        topologies.read(value)


def test_registry_errors_are_configuration_errors():
    assert issubclass(RegistryError, ConfigurationError)


class TestEntryPoints:
    def test_bring_the_kinds_of_other_packages(self, topologies, installed):
        installed["dynamiq.topologies"] = [EntryPoint(Star)]

        assert topologies.read({"kind": "acme-star", "rays": 3}) == Star(rays=3)

    def test_are_looked_at_only_for_unknown_kinds(self, topologies, installed):
        entry = EntryPoint(Star)
        installed["dynamiq.topologies"] = [entry]

        topologies.get("ring")
        assert entry.loaded == 0
        topologies.get("acme-star")
        topologies.get("acme-star")
        assert entry.loaded == 1

    def test_of_the_other_group_do_not_count(self, topologies, installed):
        installed["dynamiq.compressors"] = [EntryPoint(Star)]

        with pytest.raises(RegistryError, match="'acme-star'"):
            topologies.get("acme-star")

    def test_that_cannot_be_loaded_are_named(self, topologies, installed):
        class Broken(EntryPoint):
            name, value = "star", "acme.stars:Star"

            def load(self):
                raise ImportError("no module named acme")

        installed["dynamiq.topologies"] = [Broken(None)]
        with pytest.raises(RegistryError, match=r"star = acme.stars:Star cannot.*named acme"):
            topologies.get("acme-star")
        assert topologies.get("ring") is Ring

    def test_must_not_claim_a_kind_that_exists(self, topologies, installed):
        class OtherRing(Star):
            kind: Literal["ring"] = "ring"

        installed["dynamiq.topologies"] = [EntryPoint(OtherRing)]
        with pytest.raises(RegistryError, match=r"'ring'.*already has"):
            topologies.get("acme-star")
        assert topologies.get("ring") is Ring


def test_dynamiq_registers_its_own():
    assert topology_registry.get("ring") is Ring
    assert topology_registry.get("butterfly") is Butterfly
    assert compressor_registry.get("uncompressed") is Uncompressed
    assert compressor_registry.get("dynamiq") is DynamiQCompressor
