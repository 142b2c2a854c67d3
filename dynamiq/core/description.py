"""A description is a value: the frozen pydantic model that compressors and topologies share."""

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from dynamiq.core.errors import ConfigurationError


class Value(BaseModel):
    """A frozen pydantic model whose refusals are ConfigurationErrors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, *unnamed: Any, **data: Any) -> None:
        """Check the fields.

        Raises:
            ConfigurationError: Fields are missing, unknown, of the wrong type or out of range, or
                have no name.
        """
        if unnamed:
            raise ConfigurationError(
                f"{self._name()} got {', '.join(map(repr, unnamed))} without a name; its options "
                f"are {', '.join(self._options()) or 'none'}"
            )
        try:
            super().__init__(**data)
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, e['loc'])) or 'value'}={e['input']!r}: {e['msg']}"
                for e in error.errors()
            ]
            if any(e["type"] == "extra_forbidden" for e in error.errors()):
                problems.append(f"its options are {', '.join(self._options()) or 'none'}")
            text = "; ".join(problems)
            raise ConfigurationError(f"{self._name()} cannot be built with {text}") from None

    @classmethod
    def _name(cls) -> str:
        return cls.model_config.get("title") or cls.__name__

    @classmethod
    def _options(cls) -> list[str]:
        return [name for name in cls.model_fields if name != "kind"]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON types, those of nested descriptions included."""
        return self.model_dump(mode="json", serialize_as_any=True)


class Description(Value):
    """A hashable, serialisable configuration that names its class by ``kind``.

    Subclasses override ``kind`` with a ``Literal`` that has a default. Fields holding another
    description use the types of ``dynamiq.core.registry``, so that they are read back as what
    they were.
    """

    kind: str

    def digest(self) -> bytes:
        """Return 16 bytes that differ whenever the configuration differs."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
