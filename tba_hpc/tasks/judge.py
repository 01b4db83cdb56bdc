"""A reward by a judge that answers over HTTP: a chat model, or a server of the user's own.

Each answer is one POST of JSON. With the name of a model it is a chat of one message, and the reward is the
last number that the judge writes; without, it is the row's fields and the completion, and the reward is the
number that comes back, or the ``reward`` of an object. Redirections are not followed: they would take the key
along.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from urllib import request
from urllib.error import HTTPError

from tba_hpc.config import ConfigError, RewardSection

LONGEST_ANSWER = 1 << 20
"""Bytes of an answer that are read."""

RETRIES = 3
"""Times that a judge is asked again if it is busy, away or silent."""

FIRST_PAUSE = 0.5
"""Pause before a judge is asked again, s; it doubles each time, up to LONGEST_PAUSE."""

LONGEST_PAUSE = 30.0

BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Status codes of a server that may answer later."""

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class JudgeError(RuntimeError):
    """A judge gave no reward; the message says what it did instead, and never holds the key."""


class _NoRedirection(request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Follow none."""


class Judge:
    """A reward by asking one; as many answers at once as its section allows. Raises JudgeError.

    key: what it is called in errors. pause: waits. Raises ConfigError where the environment lacks its key.
    """

    def __init__(
        self, key: str, section: RewardSection, *, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self._key = key
        self._section = section
        self._pause = pause
        self._headers = {"Content-Type": "application/json", **_authorisation(key, section.key_variable)}
        self._open = request.build_opener(_NoRedirection).open
        self._pool = ThreadPoolExecutor(section.concurrency, "judge")

    def __call__(self, answers: Sequence[tuple[Mapping[str, object], str]]) -> list[float]:
        """The judge's number for each row and completion; NaN where a chat model writes none."""
        asked = [self._pool.submit(self._ask, *answer) for answer in answers]
        return [one.result() for one in asked]

    def _ask(self, row: Mapping[str, object], completion: str) -> float:
        body = json.dumps(self._question(row, completion)).encode()
        for again in range(RETRIES + 1):
            if again:
                self._pause(min(FIRST_PAUSE * 2 ** (again - 1), LONGEST_PAUSE))
            try:
                return self._reward(self._post(body))
            except HTTPError as error:
                found = f"status {error.code}"
                if error.code not in BUSY:
                    break
            except (OSError, HTTPException) as error:  # away, silent, or cut off
                found = str(getattr(error, "reason", error)) or type(error).__name__
        raise JudgeError(
            f"{self._key}: {self._section.url} gave no answer ({found}; asked {again + 1} times)"
        )

    def _post(self, body: bytes) -> bytes:
        assert self._section.url is not None
        asked = request.Request(self._section.url, body, self._headers)
        with self._open(asked, timeout=self._section.seconds) as answer:
            return bytes(answer.read(LONGEST_ANSWER))

    def _question(self, row: Mapping[str, object], completion: str) -> dict[str, object]:
        fields = {**row, "completion": completion}
        if self._section.prompt is None:
            return fields
        content = filled_in(self._section.prompt, fields)
        return {
            "model": self._section.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
        }

    def _reward(self, answer: bytes) -> float:
        try:
            found = json.loads(answer)
            if self._section.model is not None:
                numbers = NUMBER.findall(found["choices"][0]["message"]["content"] or "")
                return float(numbers[-1]) if numbers else math.nan
            return float(found["reward"] if isinstance(found, dict) else found)
        except (ValueError, LookupError, TypeError):
            raise JudgeError(
                f"{self._key}: {self._section.url} answered {answer[:80]!r}, which holds no reward"
            ) from None


def filled_in(template: str, fields: Mapping[str, object]) -> str:
    """``template`` with {name} replaced by fields, once: what they hold themselves stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda m: str(fields[m[1]]) if m[1] in fields else m[0], template)


def _authorisation(key: str, variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    if not (secret := os.environ.get(variable)):
        raise ConfigError(
            f"{key}.key_variable={variable} is not set in the environment: export it where the run is started"
        )
    return {"Authorization": f"Bearer {secret}"}
