"""Whole servers, as users run them."""
