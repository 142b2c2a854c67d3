"""How long a step takes: one rank's clock, run over what the pipeline would do."""
