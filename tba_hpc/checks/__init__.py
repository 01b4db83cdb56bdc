"""What will go wrong, told before it does: the machine, the cluster, the task, the memory."""
