"""How much of an encoding is worked on at once."""

TILE = 8192
"""Patches that go through an embedding, a rotation, an MLP or a merger at once, so that their temporaries stay small."""
