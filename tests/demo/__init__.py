"""Tests of the demo checkpoint and of the tools that make it."""
