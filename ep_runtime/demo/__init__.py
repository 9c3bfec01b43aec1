"""The demo model and its client."""
