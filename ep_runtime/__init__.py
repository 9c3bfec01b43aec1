"""Expert-parallel inference runtime."""
