"""OmniReduce: only blocks that some rank asks for are sent."""

from dynamiq.compressors.omnireduce.compressor import OmniReduceCompressor

__all__ = ["OmniReduceCompressor"]
