"""What a searcher's rewards print reaches its log up to a bound, and what it logs itself always does."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging, sys
from tba_hpc.run import bounded_output
logging.basicConfig(format="%(message)s")
bounded_output.MOST_OUTPUT = 100
bounded_output.bound_output()
sys.{name}.reconfigure(encoding="latin-1")
for _ in range(5):
    print("é" * 29, file=sys.{name})
print("more", file=sys.{name}, flush=True)
sys.{name}.writelines(["more\\n"] * 3)
logging.warning("logged")
"""


def printed(name: str) -> tuple[bytes, bytes]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{name}", name)],
        capture_output=True,
        env={"PYTHONIOENCODING": "utf-8"},
        check=True,
        timeout=60,
    )
    return done.stdout, done.stderr


def test_what_is_printed_is_cut_and_what_is_logged_is_not() -> None:
    line = "é".encode("latin-1") * 29 + b"\n"
    dropped = "\n[what is printed from here on is dropped]\n"
    cut = line * 3 + line[:10] + dropped.encode()
    for name in ("stdout", "stderr"):
        out, err = printed(name)
        assert (out, err) == ((cut, b"logged\n") if name == "stdout" else (b"", cut + b"logged\n"))
