"""Decisions only: which sequences run, who waits, who gives way. No torch, no clock, no I/O."""
