"""Wire formats: how entries become bytes."""
