"""The commands of ``tba`` that are too long for ``cli.py``."""
