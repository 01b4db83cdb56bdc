"""Sends a run's metrics and evaluations to Weights & Biases or TensorBoard: ``tba track``.

It reads only files, so it works during and after a run, and on any machine that sees the directory.
"""
