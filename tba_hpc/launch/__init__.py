"""Starts the ranks of a run, on this machine or as jobs of Slurm."""


class LaunchError(RuntimeError):
    """Error for a run that cannot be started, here or on Slurm; the message is one sentence for the user."""
