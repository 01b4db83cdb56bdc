"""States of a Slurm job, as squeue names them."""

QUEUED = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"})
"""States of a job that waits for nodes, for the first time or again."""

WITH_PROCESSES = frozenset({"RUNNING", "SUSPENDED", "STOPPED"})
"""States of a job whose processes may write."""

WITH_NODES = WITH_PROCESSES | {"CONFIGURING", "COMPLETING", "SIGNALING", "STAGE_OUT", "RESIZING"}
"""States of a job that has nodes."""

NO_ANSWER = "UNKNOWN"
"""State of a job if Slurm cannot be asked, or does not answer."""

FORGOTTEN = "FORGOTTEN"
"""State of a job that Slurm no longer knows."""
