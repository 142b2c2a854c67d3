"""Wire formats: how entries become bytes."""

from dynamiq.compressors.dynamiq import DynamiQCompressor
from dynamiq.compressors.feedback import ErrorFeedback
from dynamiq.compressors.mx import MXCompressor
from dynamiq.compressors.omnireduce import OmniReduceCompressor
from dynamiq.compressors.thc import THCCompressor
from dynamiq.compressors.uncompressed import Uncompressed

__all__ = [
    "DynamiQCompressor",
    "ErrorFeedback",
    "MXCompressor",
    "OmniReduceCompressor",
    "THCCompressor",
    "Uncompressed",
]
