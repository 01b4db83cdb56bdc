"""Benches of what grows with a run: one module each, with ``measure``."""
