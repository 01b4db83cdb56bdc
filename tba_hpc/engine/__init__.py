"""Engines: vLLM samples completions with the newest weights, in a separate process."""
