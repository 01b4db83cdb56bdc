"""Sampling of completions with the newest weights, by vLLM in a separate process."""
