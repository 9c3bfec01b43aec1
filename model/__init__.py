"""Models: specs, layers, state, families and the loader."""
