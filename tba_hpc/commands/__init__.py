"""Commands of tba that are longer than a few lines."""
