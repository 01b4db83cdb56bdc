"""What a cluster or a machine has, and what of it will go wrong."""
