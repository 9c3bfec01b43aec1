"""Random input for everything that reads bytes from outside: `make fuzz`."""
