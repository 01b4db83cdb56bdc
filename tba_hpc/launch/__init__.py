"""Ways to start the roles of a run."""


class LaunchError(RuntimeError):
    """Error for a run that cannot be started, here or on Slurm; the message is one sentence for the user."""


ONE_MACHINE = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}
"""Environment that limits Open MPI's ranks to shared memory; otherwise each listens on every network."""
