"""Engines: vLLM samples completions with the newest weights, in a process of its own."""
