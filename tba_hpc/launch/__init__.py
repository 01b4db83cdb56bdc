"""Ways to start the roles of a run."""
