"""The project's own measurements: a demo and the benchmarks that reuse its parts.

Not shipped in the wheel. Everything here uses ``dynamiq`` as a reader of its documentation would.
"""
