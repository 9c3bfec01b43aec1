"""Offline use: a model in this process, for scripts and benchmarks. `from ep_runtime import LLM, SamplingParams`.

Under torchrun every rank runs the same script. Rank 0 drives; on the other ranks the constructor serves rank 0's commands until it
closes its `LLM`, at the latest when its script ends, and then ends the process with status 0: what follows the constructor runs on
rank 0 alone.
"""
