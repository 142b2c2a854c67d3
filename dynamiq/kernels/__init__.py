"""The arithmetic of the wire formats: one module per build, one specification."""
