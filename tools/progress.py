"""Runs a pip command, and prints only a line of progress every ten seconds; if pip fails, shows its errors.

For example: ``progress.py .venv/bin/pip install --requirement /dev/stdin < requirements.txt``.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

SECONDS = 10
MET = ("Collecting ", "Requirement already satisfied: ")
NOTES = ("Collecting ", "Downloading ", "Using cached ", "Processing ", "Building ", "Saved ")


def installed() -> int:
    """Return the number of packages in this environment."""
    return len(list(Path(sysconfig.get_path("purelib")).glob("*.dist-info")))


def progress(said: str, of: str, added: int) -> str:
    """Return what pip is doing now: it fetches all packages first, then unpacks them.

    said: output of pip so far. of: number of packages, such as " of 9"; empty if only pip knows it. added:
    number of packages unpacked so far.
    """
    lines = [line.strip() for line in said.splitlines()]
    if names := next((line for line in lines if line.startswith("Installing collected packages")), ""):
        return f"unpacking and compiling: {added} of {names.count(',') + 1} packages"
    met = sum(line.startswith(MET) for line in lines)
    now = next((line for line in reversed(lines) if line.startswith(NOTES)), "asking the index")
    return f"fetched {max(met - 1, 0)}{of} packages: {now[:80]}"


def failure(said: str) -> str:
    """Return pip's output from its first error on; without one, its last lines."""
    lines = said.splitlines()
    errors = [number for number, line in enumerate(lines) if line.strip().lower().startswith("error")]
    return "\n".join(lines[errors[0] if errors else -20 :])


def run(command: list[str], pins: str) -> tuple[int, str]:
    """Run a pip command and print its progress; return its exit status and its output.

    pins: standard input of the command.
    """
    of = f" of {len(pins.splitlines())}" if "--requirement" in command else ""
    start, before = time.monotonic(), installed()
    with tempfile.TemporaryDirectory() as folder:
        given, told = Path(folder) / "given", Path(folder) / "told"
        given.write_text(pins)
        with given.open() as stdin, told.open("w") as stdout:
            process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.STDOUT)
            while (status := ended(process)) is None:
                minutes, seconds = divmod(int(time.monotonic() - start), 60)
                now = progress(told.read_text(errors="replace"), of, installed() - before)
                print(f"  {minutes}:{seconds:02d} {now}", flush=True)
        return status, told.read_text(errors="replace")


def ended(process: subprocess.Popen[bytes]) -> int | None:
    """Wait up to SECONDS; return the exit status, or None if the process still runs."""
    try:
        return process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        return None


def main() -> None:
    """Run the command in the arguments, and exit with its status."""
    words = sys.argv[1:]
    pins = sys.stdin.read() if "/dev/stdin" in words else ""
    status, said = run([*words, "--progress-bar", "off", "--disable-pip-version-check"], pins)
    if status:
        print(failure(said), file=sys.stderr)
    sys.exit(status)


if __name__ == "__main__":
    main()
