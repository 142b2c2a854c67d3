from dynamiq.transports.loopback import LoopbackTransport

__all__ = ["LoopbackTransport"]
