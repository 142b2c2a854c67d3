"""The names that users import: written down here, so that none comes or goes unnoticed."""

import inspect
import pkgutil
import re
import subprocess
import sys
from typing import get_origin

import pytest

import dynamiq
from dynamiq.core import errors

NAMES = [
    "AgreementError",
    "AnyCompressor",
    "AnyTopology",
    "Butterfly",
    "Call",
    "ClosedError",
    "Compressor",
    "ConfigurationError",
    "DenseEncoding",
    "Direct",
    "DynamiQCompressor",
    "DynamiqError",
    "Encoding",
    "ErrorFeedback",
    "ErrorReport",
    "GlooTransport",
    "Handle",
    "Hierarchical",
    "Hop",
    "InputError",
    "KernelError",
    "Layout",
    "LoopbackTransport",
    "MXCompressor",
    "Message",
    "Metrics",
    "NCCLTransport",
    "NonFiniteError",
    "OmniReduceCompressor",
    "PeerLostError",
    "PeerTimeoutError",
    "Pipeline",
    "RegistryError",
    "Ring",
    "Schedule",
    "State",
    "Statistics",
    "Step",
    "THCCompressor",
    "Topology",
    "Transport",
    "TransportError",
    "Uncompressed",
    "compressor_registry",
    "measure_error",
    "topology_registry",
    "vnmse",
]

FIELD_TYPES = {"AnyCompressor", "AnyTopology"}
REGISTRIES = {"compressor_registry", "topology_registry"}

CLASSES = [name for name in dynamiq.__all__ if inspect.isclass(getattr(dynamiq, name))]
FUNCTIONS = [name for name in dynamiq.__all__ if inspect.isfunction(getattr(dynamiq, name))]


def test_exactly_these_names_are_exported():
    assert sorted(NAMES) == sorted(dynamiq.__all__)


def test_all_is_sorted():
    assert dynamiq.__all__ == sorted(dynamiq.__all__)


def test_every_name_is_a_class_a_function_or_listed_here():
    assert {*CLASSES, *FUNCTIONS} | FIELD_TYPES | REGISTRIES == set(dynamiq.__all__)


def test_nothing_else_looks_public():
    """What `import dynamiq` leaves behind besides its names are its own submodules."""
    others = {name for name in vars(dynamiq) if not name.startswith("_")} - set(dynamiq.__all__)
    modules = {name for name in others if f"dynamiq.{name}" in sys.modules}

    assert others - modules <= {"Path", "check_installation"}


def test_star_import_gives_the_names():
    code = "from dynamiq import *; print(*sorted(n for n in dir() if n[0] != '_'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.split() == sorted(dynamiq.__all__)


@pytest.mark.parametrize("name", [*CLASSES, *FUNCTIONS])
def test_a_docstring_begins_with_one_sentence(name):
    value = getattr(dynamiq, name)

    if inspect.isclass(value):
        assert vars(value).get("__doc__"), "an inherited docstring says nothing about this class"
    first = value.__doc__.splitlines()[0]
    assert re.fullmatch(r"[A-Z`].{10,}[.:]", first), first


@pytest.mark.parametrize("name", CLASSES)
def test_public_methods_are_documented(name):
    cls = getattr(dynamiq, name)
    for attribute, value in vars(cls).items():
        function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if attribute.startswith("_") or not inspect.isfunction(function):
            continue
        assert function.__doc__, f"{name}.{attribute}"


def test_signatures_are_annotated():
    for name in FUNCTIONS:
        signature = inspect.signature(getattr(dynamiq, name))
        annotations = [p.annotation for p in signature.parameters.values()]
        assert inspect.Signature.empty not in [*annotations, signature.return_annotation], name


def test_every_error_is_exported_and_in_one_tree():
    tree = {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }

    assert all(issubclass(value, dynamiq.DynamiqError) for value in tree.values())
    assert all(getattr(dynamiq, name) is value for name, value in tree.items())


def test_the_tree_of_errors_is_the_one_that_is_drawn():
    """The drawing at the top of errors.py is the documentation of the hierarchy."""
    drawn, path = {}, []
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+Error)\b", line):
            depth = len(match[1]) // 4
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1] if depth else "Exception"

    real = {
        name: value.__bases__[0].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value)
    }
    assert drawn == real
    assert issubclass(dynamiq.PeerTimeoutError, TimeoutError)


@pytest.mark.parametrize("name", sorted(FIELD_TYPES))
def test_field_types_are_types_of_fields(name):
    assert get_origin(getattr(dynamiq, name)) is not None


@pytest.mark.parametrize("name", sorted(REGISTRIES))
def test_registries_are_the_ones_in_use(name):
    description = dynamiq.Ring() if name.startswith("topology") else dynamiq.Uncompressed()

    assert getattr(dynamiq, name).read(description.to_dict()) == description


def test_no_name_hides_a_subpackage():
    """`import dynamiq.topologies` must make `dynamiq.topologies` that module."""
    submodules = {info.name for info in pkgutil.iter_modules(dynamiq.__path__)}

    assert not submodules & set(dynamiq.__all__)
