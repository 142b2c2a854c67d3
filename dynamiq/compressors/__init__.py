"""Wire formats: how entries become bytes."""

from dynamiq.compressors.dynamiq import DynamiQCompressor
from dynamiq.compressors.feedback import ErrorFeedback
from dynamiq.compressors.thc import THCCompressor
from dynamiq.compressors.uncompressed import Uncompressed

__all__ = ["DynamiQCompressor", "ErrorFeedback", "THCCompressor", "Uncompressed"]
