"""Measurements of a whole server. Each script: `python -m benchmarks.NAME --help`."""
