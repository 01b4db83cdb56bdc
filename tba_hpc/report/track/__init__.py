"""Sends a run's metrics and evaluations to Weights & Biases or TensorBoard: ``tba track``.

Only the run's files are read, so tracking works during and after the run, on any machine that sees them.
"""
