"""A server under steady load for a long time: `make soak`."""
