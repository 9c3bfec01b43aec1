"""Head loop, worker loop, executor and sampler."""
