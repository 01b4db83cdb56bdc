"""Starts the ranks of a run, on this machine or as jobs of Slurm."""


class LaunchError(RuntimeError):
    """Error for a run that cannot be started, here or on Slurm; the message is one sentence for the user."""


ONE_MACHINE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
"""Environment variables that make ranks of Open MPI exchange messages through shared memory alone. Otherwise
each rank listens on every network of the machine."""
