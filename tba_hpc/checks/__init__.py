"""Checks that find problems before they occur: of the machine, the cluster, the task and the memory."""
