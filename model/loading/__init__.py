"""Reading a checkpoint into a module: checks, files, dummy weights."""
