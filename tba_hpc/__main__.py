"""The command ``tba``, also as ``python -m tba_hpc``."""

import sys


def main() -> None:
    """Entry point: what a batch script asks at every turn need not import the other commands."""
    if sys.argv[1:2] == ["supervise"]:
        from tba_hpc.launch.supervise import main as supervise

        sys.exit(supervise(sys.argv[2:]))
    from tba_hpc.cli import main as tba

    tba()


if __name__ == "__main__":
    main()
