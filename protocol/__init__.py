"""The control plane: frames, commands, links, handshake and errors. Imports no torch."""
