"""Follows what a run writes, and tells it to Weights & Biases or TensorBoard; ``tba track``.

It must not know how a run is trained: the metrics files and evaluations are all that it reads, so it works
beside a run, after it, and on another machine that sees the directory.
"""
