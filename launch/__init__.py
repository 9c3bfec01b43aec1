"""Ways to start the runtime."""
