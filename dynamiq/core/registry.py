"""Kind → class, for descriptions that are read back from files, digests and headers.

Third-party packages add theirs through the entry points ``dynamiq.compressors`` and
``dynamiq.topologies``; these are looked at only when a kind is not known yet.
"""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import BeforeValidator, SerializeAsAny

from dynamiq.core.compressor import Compressor
from dynamiq.core.description import Description
from dynamiq.core.errors import RegistryError
from dynamiq.core.topology import Topology

D = TypeVar("D", bound=Description)


class Registry(Generic[D]):
    """The classes of one sort of description by their ``kind``."""

    def __init__(self, group: str) -> None:
        """Create an empty registry that falls back on the entry points of ``group``."""
        self.group = group
        self._classes: dict[str, type[D]] = {}

    def register(self, cls: type[D]) -> type[D]:
        """Add a class (usable as a decorator).

        Raises:
            RegistryError: Its kind has no default, or another class has the same kind.
        """
        kind = _kind_of(cls)
        present = self._classes.setdefault(kind, cls)
        if present is not cls:
            raise RegistryError(
                f"{cls.__module__}.{cls.__qualname__} asks for the kind {kind!r} in {self.group}, "
                f"which {present.__module__}.{present.__qualname__} already has; rename one of them"
            )
        return cls

    def get(self, kind: str) -> type[D]:
        """Return the class of a kind, loading entry points if it is not known yet.

        Raises:
            RegistryError: Nobody registered the kind; the message lists what there is.
        """
        if kind not in self._classes:
            for entry in entry_points(group=self.group):
                self.register(self._load(entry))
        if kind not in self._classes:
            raise RegistryError(
                f"no {self.group} entry has the kind {kind!r}; there are "
                f"{', '.join(sorted(self._classes)) or 'none'}; install the package that brings it"
            )
        return self._classes[kind]

    def read(self, value: D | Mapping[str, Any]) -> D:
        """Build a description from what ``Description.to_dict`` returned.

        Raises:
            RegistryError: The mapping has no kind, or an unknown one.
        """
        if isinstance(value, Mapping):
            if "kind" not in value:
                raise RegistryError(f"a {self.group} description needs a 'kind', got {dict(value)}")
            return self.get(str(value["kind"]))(**value)
        if not isinstance(value, Description):
            raise RegistryError(f"a {self.group} description is a mapping, got {value!r}")
        return value

    def _load(self, entry: EntryPoint) -> type[D]:
        try:
            found: type[D] = entry.load()
        except Exception as error:
            raise RegistryError(
                f"the {self.group} entry {entry.name} = {entry.value} cannot be loaded: {error}; "
                f"repair or uninstall its package"
            ) from error
        return found


def _kind_of(cls: type[Description]) -> str:
    field = cls.model_fields["kind"]
    literal = get_args(field.annotation)
    if field.default not in literal:
        raise RegistryError(
            f"{cls.__qualname__}.kind must be a Literal with a default, such as "
            f'kind: Literal["mine"] = "mine"'
        )
    return str(field.default)


compressor_registry: Registry[Compressor] = Registry("dynamiq.compressors")
topology_registry: Registry[Topology] = Registry("dynamiq.topologies")

AnyCompressor = Annotated[SerializeAsAny[Compressor], BeforeValidator(compressor_registry.read)]
"""Field type for a compressor inside another one."""
AnyTopology = Annotated[SerializeAsAny[Topology], BeforeValidator(topology_registry.read)]
"""Field type for a topology inside another one."""
