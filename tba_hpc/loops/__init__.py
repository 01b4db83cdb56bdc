"""The loops of trainer and searcher, and their parts."""
