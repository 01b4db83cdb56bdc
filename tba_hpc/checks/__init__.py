"""Checks of the machine, the cluster, the task and the memory, made before a run starts."""
