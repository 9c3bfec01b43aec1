"""Benchmarks of decode, prefill, serving and collectives."""
