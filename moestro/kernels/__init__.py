"""Arithmetic on tensors. Knows nothing of requests, caches or checkpoints."""
