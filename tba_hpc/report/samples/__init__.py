"""``tba samples``: shows a run's completions and what became of them."""
