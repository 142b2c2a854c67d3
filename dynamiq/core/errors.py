"""Every exception dynamiq raises, in one tree.

::

    DynamiqError
    ├── ConfigurationError      a description cannot be built or cannot be met
    │   └── RegistryError       a kind is unknown, or registered twice
    ├── InputError              a tensor or an argument is refused; nothing was written
    ├── AgreementError          ranks disagree about configuration, or about one call
    ├── NonFiniteError          a NaN or an infinity, with on_nonfinite="raise"
    ├── KernelError             a kernel cannot be compiled, loaded or launched
    ├── ClosedError             an operation on a closed pipeline or transport
    └── TransportError          bytes could not be moved
        ├── PeerLostError       the connection to a peer broke
        └── PeerTimeoutError    a peer stayed silent; also a TimeoutError

Messages say what was asked, what is there and what to do.
"""


class DynamiqError(Exception):
    """Root of all exceptions raised by dynamiq."""


class ConfigurationError(DynamiqError):
    """A compressor, topology or pipeline cannot be built as described."""


class RegistryError(ConfigurationError):
    """A kind is not registered, or two classes claim the same kind."""


class InputError(DynamiqError):
    """A tensor or argument is refused before anything is sent or written."""


class AgreementError(DynamiqError):
    """Ranks differ in configuration (at connect) or in one call (at its header)."""


class NonFiniteError(DynamiqError):
    """A gradient holds a NaN or an infinity and ``on_nonfinite="raise"`` was asked for."""


class KernelError(DynamiqError):
    """A kernel cannot be compiled, loaded or launched."""


class ClosedError(DynamiqError):
    """The pipeline or transport was closed before this operation."""


class TransportError(DynamiqError):
    """Bytes could not be moved; the transport is closed for good afterwards."""


class PeerLostError(TransportError):
    """The connection to a peer broke: the process died or closed its transport."""


class PeerTimeoutError(TransportError, TimeoutError):
    """A peer sent or took nothing within the transport's timeout."""
