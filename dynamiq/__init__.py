"""Compressed multi-hop all-reduce for PyTorch: about 5 bits per gradient entry on the wire."""
