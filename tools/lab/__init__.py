"""Parts of tools/experiments.py: one module per experiment, and modules that they share."""
