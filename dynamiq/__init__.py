"""Compressed multi-hop all-reduce for PyTorch: about 5 bits per gradient entry on the wire.

A pipeline composes three independent descriptions::

    pipeline = Pipeline(DynamiQCompressor.paper(bit_budget=5), Butterfly(), GlooTransport())
    ddp_model.register_comm_hook(None, pipeline.ddp_hook)
"""

from pathlib import Path

from dynamiq.installation import check_installation

check_installation(Path(__file__).parent)

from dynamiq.compressors import (
    DynamiQCompressor,
    ErrorFeedback,
    MXCompressor,
    OmniReduceCompressor,
    THCCompressor,
    Uncompressed,
)
from dynamiq.core.compressor import Compressor, Encoding, State, Statistics
from dynamiq.core.dense import DenseEncoding
from dynamiq.core.errors import (
    AgreementError,
    ClosedError,
    ConfigurationError,
    DynamiqError,
    InputError,
    KernelError,
    NonFiniteError,
    PeerLostError,
    PeerTimeoutError,
    RegistryError,
    TransportError,
)
from dynamiq.core.layout import Layout
from dynamiq.core.message import Call, Message
from dynamiq.core.metrics import ErrorReport, measure_error, vnmse
from dynamiq.core.registry import (
    AnyCompressor,
    AnyTopology,
    compressor_registry,
    topology_registry,
)
from dynamiq.core.topology import Hop, Schedule, Step, Topology
from dynamiq.core.transport import Transport
from dynamiq.pipeline import Handle, Metrics, Pipeline
from dynamiq.topologies import Butterfly, Direct, Hierarchical, Ring
from dynamiq.transports import GlooTransport, LoopbackTransport, NCCLTransport

__all__ = [
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
