"""Operators: the torch reference, the Triton kernel, and the choice between them."""
