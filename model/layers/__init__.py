"""Layers that the families share."""
