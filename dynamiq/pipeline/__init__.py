"""Collectives that users call: a compressor, a topology and a transport at work."""

from dynamiq.pipeline.handle import Handle
from dynamiq.pipeline.ledger import Metrics
from dynamiq.pipeline.pipeline import Pipeline

__all__ = ["Handle", "Metrics", "Pipeline"]
