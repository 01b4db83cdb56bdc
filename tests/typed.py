"""``tba`` as if it were typed: in this process, which has imported it, so that no test waits for that."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest.mock import patch

from tba_hpc.cli import main


def tba(*words: object) -> CompletedProcess[str]:
    """What a command prints, and its exit status."""
    command, out, err, status = ["tba", *map(str, words)], io.StringIO(), io.StringIO(), 0
    with patch.object(sys, "argv", command), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
    return CompletedProcess(command, status, out.getvalue(), err.getvalue())
