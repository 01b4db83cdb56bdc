"""The command ``tba``, also as ``python -m tba_hpc``."""

import sys


def main() -> None:
    """Run ``tba``. Batch scripts often call ``tba supervise``, which therefore imports no other command."""
    verb = sys.argv[1:2]
    if verb == ["supervise"]:
        from tba_hpc.launch.supervise import main as supervise

        sys.exit(supervise(sys.argv[2:]))
    from tba_hpc.cli import main as tba

    if verb not in (["train"], ["search"]):
        tba()
        return
    from tba_hpc.launch.rank import leaving

    with leaving():  # this process is a rank
        tba()


if __name__ == "__main__":
    main()
