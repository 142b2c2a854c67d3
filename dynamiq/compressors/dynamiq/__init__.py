"""DynamiQ: statistics, bit allocation, order, quantisers (arXiv 2602.08923)."""

from dynamiq.compressors.dynamiq.compressor import DynamiQCompressor

__all__ = ["DynamiQCompressor"]
