"""Schedules: who sends which chunk to whom, and when."""

from dynamiq.topologies.butterfly import Butterfly
from dynamiq.topologies.direct import Direct
from dynamiq.topologies.hierarchical import Hierarchical
from dynamiq.topologies.ring import Ring

__all__ = ["Butterfly", "Direct", "Hierarchical", "Ring"]
