"""One module per model family: its configuration, its weight names, its assembly."""
