"""Schedules: who sends which chunk to whom, and when."""

from dynamiq.topologies.butterfly import Butterfly
from dynamiq.topologies.ring import Ring

__all__ = ["Butterfly", "Ring"]
