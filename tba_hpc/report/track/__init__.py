"""Sends a run's metrics and evaluations to Weights & Biases or TensorBoard: ``tba track``.

It reads files only, so it works during a run, after it, and on any machine that sees the directory.
"""
