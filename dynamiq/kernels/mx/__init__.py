"""Kernels of the Microscaling formats: blocks of 32 entries that share a power of two."""
