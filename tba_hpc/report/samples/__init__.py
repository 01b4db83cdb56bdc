"""``tba samples``: what the model of a run has said, and what became of it."""
