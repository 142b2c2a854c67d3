"""How bytes move between ranks: within one process, over Gloo, over NCCL."""

from dynamiq.transports.gloo import GlooTransport
from dynamiq.transports.loopback import LoopbackTransport
from dynamiq.transports.nccl import NCCLTransport

__all__ = ["GlooTransport", "LoopbackTransport", "NCCLTransport"]
