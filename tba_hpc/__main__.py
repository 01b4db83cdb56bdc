"""The command ``tba``, also as ``python -m tba_hpc``."""

import io
import sys


def main() -> None:
    """Entry point: what a batch script asks at every turn need not import the other commands."""
    if sys.argv[1:2] == ["supervise"]:
        from tba_hpc.launch.supervise import main as supervise

        sys.exit(supervise(sys.argv[2:]))
    from tba_hpc.cli import main as tba

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # neither closed nor replaced
            stream.reconfigure(errors="replace")  # an output that cannot show a sign must not end a run
    tba()


if __name__ == "__main__":
    main()
