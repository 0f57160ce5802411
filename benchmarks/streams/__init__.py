"""What the HTTP side itself can carry; `python -m benchmarks.streams` runs it."""
