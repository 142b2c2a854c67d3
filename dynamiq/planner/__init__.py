"""Chooses compressor, topology, bit budget and bucket size from measured costs, or none."""
