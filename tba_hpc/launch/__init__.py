"""Ways to start the roles of a run."""


class LaunchError(RuntimeError):
    """The run cannot be started, here or on Slurm; the message is one sentence for the user."""
