"""Weights out, shards in: over MPI, over files, or both; shards on disk."""
