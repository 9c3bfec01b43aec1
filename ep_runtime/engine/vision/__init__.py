"""Images in the engine: the rows that slots hold, and what they add to a forward."""
