"""What will go wrong, found before it does: the machine, the cluster, the task, the memory."""
