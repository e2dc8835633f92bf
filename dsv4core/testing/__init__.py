"""Helpers for tests of backends and of the core."""
