"""``python -m tba_hpc`` is the command ``tba``."""

import sys

if sys.argv[1:2] == [
    "supervise"
]:  # what a batch script asks at every turn need not import the other commands
    from tba_hpc.launch.supervise import main as supervise

    sys.exit(supervise(sys.argv[2:]))

from tba_hpc.cli import main

main()
