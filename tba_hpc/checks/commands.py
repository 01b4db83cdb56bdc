"""Asks other programs of the machine; whatever they answer, nothing is raised."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

ANSWER_SECONDS = 60
"""Longest wait for an answer, s."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a program printed, standard output first; or, if it ``failed``, why."""

    text: str
    failed: bool = False


def ask(*command: str, environment: Mapping[str, str] = os.environ) -> Answer:
    """Run a command and wait for its answer."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=dict(environment), timeout=ANSWER_SECONDS
        )
    except FileNotFoundError:
        return Answer(f"{command[0]} is not on PATH", failed=True)
    except OSError as error:
        return Answer(str(error), failed=True)
    except subprocess.TimeoutExpired:
        return Answer(f"{command[0]} did not answer within {ANSWER_SECONDS} s", failed=True)
    return Answer(done.stdout + done.stderr, failed=bool(done.returncode))
