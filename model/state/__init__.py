"""Paged caches and slot-indexed recurrent state."""
