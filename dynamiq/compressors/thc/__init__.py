"""THC: integers that can be summed without being decoded."""

from dynamiq.compressors.thc.compressor import THCCompressor

__all__ = ["THCCompressor"]
