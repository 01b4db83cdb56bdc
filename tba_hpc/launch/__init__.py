"""Ways to start the roles of a run."""


class LaunchError(RuntimeError):
    """The run cannot be started, here or on Slurm; the message is one sentence for the user."""


ONE_MACHINE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
"""Environment in which Open MPI's ranks meet in memory alone: else each listens on every network there is."""
