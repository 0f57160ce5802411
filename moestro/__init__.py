"""Moestro serves Mixture-of-Experts language models that are bigger than the GPU."""

__version__ = "0.1.0"
