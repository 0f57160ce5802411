"""Tests of Moestro; a package so that tests can import `tests.oracle`."""
