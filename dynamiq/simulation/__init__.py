"""What formats do to gradients that one has, on any number of ranks, in one thread."""
