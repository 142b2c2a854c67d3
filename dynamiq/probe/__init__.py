"""Measures what a planner has to know, on the ranks that will train."""

from dynamiq.probe.backward import timeline
from dynamiq.probe.hardware import probe

__all__ = ["probe", "timeline"]
