"""The trainer's and the searcher's loop, and what they consist of."""
