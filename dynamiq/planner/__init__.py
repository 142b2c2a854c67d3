"""Chooses compressor, topology, bit budget and bucket size from measured costs, or none."""

from dynamiq.planner.hardware import HardwareProfile
from dynamiq.planner.plan import Plan, load, make
from dynamiq.planner.search import Objective, Search
from dynamiq.planner.spectrum import GradientSpectrum
from dynamiq.planner.workload import WorkloadProfile

__all__ = [
    "GradientSpectrum",
    "HardwareProfile",
    "Objective",
    "Plan",
    "Search",
    "WorkloadProfile",
    "load",
    "make",
]
