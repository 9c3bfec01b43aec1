"""The sampler's parts: randomness, edits of logits, penalties, filters, log-probabilities, and the plan of one call."""
