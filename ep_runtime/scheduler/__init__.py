"""Queue, admission, plans, slots and blocks. Pure Python, no torch."""
