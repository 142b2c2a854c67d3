"""Chooses compressor, topology, bit budget and bucket size from measured costs, or none."""

from dynamiq.planner.errors.observation import spectrum_of
from dynamiq.planner.errors.prediction import predicted_vnmse
from dynamiq.planner.plan import Plan, load, make
from dynamiq.planner.profiles.hardware import HardwareProfile
from dynamiq.planner.profiles.spectrum import GradientSpectrum
from dynamiq.planner.profiles.workload import WorkloadProfile
from dynamiq.planner.search import Objective, Search

__all__ = [
    "GradientSpectrum",
    "HardwareProfile",
    "Objective",
    "Plan",
    "Search",
    "WorkloadProfile",
    "load",
    "make",
    "predicted_vnmse",
    "spectrum_of",
]
