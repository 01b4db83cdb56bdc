"""Values, the replay buffer and the interfaces that everything else is built on."""
