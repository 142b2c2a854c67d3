"""What a pipeline was built with: everything that must be equal on all ranks, as one value."""

from typing import Any, Literal

from pydantic import ConfigDict, Field

from dynamiq.core.compressor import Compressor
from dynamiq.core.description import Value
from dynamiq.core.errors import ConfigurationError
from dynamiq.core.registry import AnyCompressor, AnyTopology
from dynamiq.core.topology import Topology
from dynamiq.core.transport import Transport

PROTOCOL = 1
"""Changes iff ranks with different numbers could not work together."""


class Settings(Value):
    """The arguments of :class:`dynamiq.Pipeline`, which documents them."""

    model_config = ConfigDict(title="Pipeline")

    protocol: int = PROTOCOL
    compressor: AnyCompressor
    topology: AnyTopology
    seed: int = Field(ge=-(2**63), lt=2**64)
    min_numel: int = Field(ge=0)
    start_step: int = Field(ge=0)
    segments: int | None = Field(ge=1)
    compress_float64: bool
    on_nonfinite: Literal["propagate", "raise"]
    verify_every: int | None = Field(ge=1)
    capture: int | None = Field(ge=1)

    @property
    def compresses(self) -> bool:
        """Whether anything travels in another format than plain floats."""
        return self.compressor.kind != "uncompressed" or self.topology.compresses

    @classmethod
    def check(cls, transport: object, **arguments: Any) -> "Settings":
        """Build the settings.

        Raises:
            ConfigurationError: An argument is out of range or of the wrong kind.
        """
        parts = [
            (arguments["compressor"], "compressor", Compressor),
            (arguments["topology"], "topology", Topology),
            (transport, "transport", Transport),
        ]
        for part, name, kind in parts:
            if not isinstance(part, kind):
                hint = f"; call it: {part.__name__}()" if isinstance(part, type) else ""
                raise ConfigurationError(
                    f"{name} must be a {kind.__name__}, got {part!r}{hint}; the order is "
                    f"Pipeline(compressor, topology, transport)"
                )
        return cls(**arguments)
