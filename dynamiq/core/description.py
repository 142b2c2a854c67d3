"""A description is a value: the frozen pydantic model that compressors and topologies share."""

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Description(BaseModel):
    """A frozen, hashable, serialisable configuration that names its class by ``kind``.

    Subclasses override ``kind`` with a ``Literal`` that has a default. Fields holding another
    description use the types of ``dynamiq.core.registry`` so that they are written out in full
    and read back as what they were.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    kind: str

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain JSON types, ``kind`` included."""
        return self.model_dump(mode="json")

    def digest(self) -> bytes:
        """Return 16 bytes that differ whenever the configuration differs."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
