"""Tests: unit (one process), distributed (real ranks), http, gpu."""
