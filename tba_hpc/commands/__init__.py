"""The commands of tba that are more than a few lines."""
