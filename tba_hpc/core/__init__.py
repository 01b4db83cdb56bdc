"""Values, the replay buffer and the interfaces on which everything else is built."""
