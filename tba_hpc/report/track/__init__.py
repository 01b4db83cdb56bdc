"""Follows what a run writes, and sends it to Weights & Biases or TensorBoard; ``tba track``.

Metrics files and evaluations are all that it reads, so it works beside a run, after it, and on another
machine that sees the directory.
"""
