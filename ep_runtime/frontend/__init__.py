"""HTTP, tokenizer, chat template, request journal, health and metrics. Imports no torch."""
