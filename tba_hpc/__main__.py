"""``python -m tba_hpc`` is the command ``tba``."""

from tba_hpc.cli import main

main()
