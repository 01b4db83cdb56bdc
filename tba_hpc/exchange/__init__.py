"""Exchange of weights and shards between trainer and searchers, over MPI, files or both; format of shards."""
