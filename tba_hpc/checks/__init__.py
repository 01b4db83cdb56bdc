"""Checks, before a run starts, of the machine, the cluster, the task and the memory."""
