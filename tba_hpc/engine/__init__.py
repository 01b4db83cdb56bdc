"""vLLM: completions by the newest weights, in a process of its own."""
