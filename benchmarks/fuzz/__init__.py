"""Fuzzing of the HTTP side; `python -m benchmarks.fuzz` runs it."""
