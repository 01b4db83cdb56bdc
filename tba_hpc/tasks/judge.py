"""A reward from a judge over HTTP: a chat model, or the user's own server.

Each completion is judged in one POST of JSON. If the config names a model, the POST is a chat with one
message, and the reward is the number in the reply (``rating``). Otherwise the POST contains the row's
fields and the completion, and the reply is a number, or an object with a number ``reward``. Redirects are not
followed, because they would send the API key elsewhere. For the same reason a proxy set in environment
variables is only used for https.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import httpx

from tba_hpc.config import ConfigError, RewardSection
from tba_hpc.core import web
from tba_hpc.tasks.fields import answer_in, filled_in

log = logging.getLogger(__name__)

LONGEST_ANSWER = 1 << 20
"""Largest number of bytes that are read from a reply."""

RETRIES = 3
"""Number of retries after a judge was busy, unreachable or silent."""

FIRST_PAUSE = 0.5
"""Pause before the first retry, in seconds. It doubles each time, up to LONGEST_PAUSE."""

LONGEST_PAUSE = 30.0
"""Longest pause before a retry, in seconds."""

BUSY = frozenset({408, 425, 429, *range(500, 600)})
"""Status codes after which a request is tried again."""

LONGEST_QUOTE = 120
"""Largest number of characters that a message quotes of a reply."""

WRONG_KEY = frozenset({401, 403})
"""Status codes that show a wrong key."""

REFUSALS = WRONG_KEY | {301, 302, 303, 307, 308, 404, 405}
"""Status codes that show a wrong key or a wrong address."""

TRIAL_SECONDS = 5.0
"""Longest wait for the reply to the trial request before a run, in seconds."""

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?", re.ASCII)

BEST = re.compile(rf"({NUMBER.pattern})[*_]*\s*(?:/|out of|of)\s*[*_]*{NUMBER.pattern}", re.ASCII)
"""Pattern of a rating and the best possible rating, as in 8/10."""

SCALE = re.compile(
    rf"\([^()]*\)|\bscale\b\W*(?:of|from)?\W*{NUMBER.pattern}\s*(?:to|-|\u2013)\s*{NUMBER.pattern}",
    re.ASCII | re.IGNORECASE,
)
"""Pattern of text whose numbers are not ratings: remarks in brackets, and the range of a scale."""

FIELD = re.compile(
    rf"""["'](?:score|rating|reward)["']\s*:\s*["']?({NUMBER.pattern})""", re.ASCII | re.IGNORECASE
)
"""Pattern of a JSON field with a rating."""

JSON_FIRST_OR_LAST = re.compile(r"\A\s*(?:```\w*\s*)?\{|\}\s*(?:```\s*)?\Z")
"""Pattern of a text that begins or ends with a JSON object, perhaps in a Markdown code fence."""


class Reply(NamedTuple):
    """Reply of a judge. wait: Retry-After, the number of seconds after which to ask again; 0 if not given."""

    status: int
    body: bytes
    wait: float


class JudgeError(RuntimeError):
    """Raised if a judge gives no reward. The message says what it did instead, but not its API key."""


class Judge:
    """Reward that asks a judge over HTTP. Up to ``concurrency`` completions are judged at the same time.

    key: config key of the reward, for errors. pause: function that waits for the given number of seconds. The
    constructor raises ConfigError if the environment lacks the judge's API key.
    """

    def __init__(
        self, key: str, section: RewardSection, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        assert section.url is not None
        self._key = key
        self._section = section
        self._url = section.url
        self._pause = pause
        self._secret = _secret(key, section.key_variable)
        self._unrated = ""  # the last reply without a number, quoted

    def __call__(self, answers: Sequence[tuple[Mapping[str, object], str]]) -> list[float]:
        """Return the judge's number for each (row, completion); NaN if a chat model writes no number.

        Raises JudgeError if the judge does not reply, if a reply is not of the form that the module
        describes, or if none of several replies of a chat model holds a number.
        """
        found = asyncio.run(self._ask_all(answers))
        if len(found) > 1 and all(map(math.isnan, found)):
            raise self._error(f"gave {len(found)} answers without a number, at last {self._unrated}")
        return found

    def try_on(self, row: Mapping[str, object]) -> None:
        """Ask about a row and an empty completion. Raises ConfigError if the judge is unreachable or refuses.

        A timeout is ignored, because a judge may be slow at first. A status code outside REFUSALS, and a
        reply without a number, only cause a warning, because a judge may reject an empty completion.
        """
        try:
            status, answer, _ = asyncio.run(self._try_on(row))
        except TimeoutError:
            return
        except httpx.HTTPError as error:
            found, remedy = _reason(error), "start the judge first, or correct url"
        else:
            found = self._refusal(status, answer)
            if status not in REFUSALS:
                what = self._masked(f"{self._key}.url={self._url}")
                if status // 100 != 2:
                    log.warning("%s did not judge an empty completion (%s)", what, found)
                elif said := self._without_number(answer):
                    log.warning(
                        "%s answered %s about an empty completion, without a number: unless it only declines "
                        "empty ones, ask for a number in %s.prompt",
                        *(what, said, self._key),
                    )
                return
            remedy = self._remedy(status)
        sentence = f"{self._key}.url={self._url} gave no answer ({found}): {remedy}"
        raise ConfigError(self._masked(sentence))

    def _without_number(self, answer: bytes) -> str:
        """Return the reply to a trial, quoted, if it holds no number; else ""."""
        try:
            return self._unrated if math.isnan(self._reward(answer)) else ""
        except JudgeError:
            return f"{self._masked(answer.decode(errors='replace'))[:LONGEST_QUOTE]!r}"

    def _remedy(self, status: int) -> str:
        """Return what to do about a refusal."""
        if status in WRONG_KEY:
            return (
                f"set {self._key}.key_variable to the environment variable with its key, or correct that key"
            )
        return "correct url or model" if status == 404 and self._section.model else "correct url"

    async def _try_on(self, row: Mapping[str, object]) -> Reply:
        async with web.client() as client:
            return await self._post(
                client, self._question(row, ""), min(self._section.seconds, TRIAL_SECONDS)
            )

    async def _ask_all(self, answers: Sequence[tuple[Mapping[str, object], str]]) -> list[float]:
        turns = asyncio.Semaphore(self._section.concurrency)
        async with web.client() as client:
            return await asyncio.gather(*(self._ask(client, turns, *answer) for answer in answers))

    async def _ask(
        self, client: httpx.AsyncClient, turns: asyncio.Semaphore, row: Mapping[str, object], completion: str
    ) -> float:
        question, wait = self._question(row, completion), 0.0
        for again in range(RETRIES + 1):
            if again:
                await self._pause(min(max(wait, FIRST_PAUSE * 2 ** (again - 1)), LONGEST_PAUSE))
            try:
                async with turns:
                    status, answer, wait = await self._post(client, question, self._section.seconds)
            except (TimeoutError, httpx.HTTPError) as error:  # silent, away, or cut off
                found = _reason(error)
                continue
            if status // 100 == 2:
                return self._reward(answer)
            found = self._refusal(status, answer)
            if status not in BUSY:
                break
        raise self._error(f"gave no answer ({found}; asked {again + 1} times)")

    async def _post(self, client: httpx.AsyncClient, question: object, seconds: float) -> Reply:
        """Send a POST and return the reply. Raises HTTPError, or TimeoutError after ``seconds``."""
        headers = {"Accept-Encoding": "identity"}  # so that a compressed reply cannot exceed the limit
        headers |= {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        body = b""
        try:
            async with (
                asyncio.timeout(seconds),
                client.stream("POST", self._url, json=question, headers=headers) as answer,
            ):
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) >= LONGEST_ANSWER:
                        break
        except TimeoutError:
            raise TimeoutError(f"timed out after {seconds:g} s") from None
        wait = answer.headers.get("Retry-After", "")  # seconds, or a date, which is ignored
        return Reply(answer.status_code, body[:LONGEST_ANSWER], float(wait) if wait.isdecimal() else 0.0)

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
                return self._rated(found["choices"][0])
            return float(found["reward"] if isinstance(found, dict) else found)
        except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
            said = self._masked(answer.decode(errors="replace"))  # before truncation could split the key
            raise self._error(f"answered {said[:LONGEST_QUOTE]!r}, which holds no reward") from None

    def _rated(self, choice: Mapping[str, Any]) -> float:
        reward = _rating_of(choice)
        if math.isnan(reward):
            said = self._masked(str(choice["message"]["content"]))[:LONGEST_QUOTE]
            self._unrated = f"{said!r} (finish_reason {choice.get('finish_reason')})"
        return reward

    def _refusal(self, status: int, answer: bytes) -> str:
        """Return a status with the beginning of the reply, which often says why."""
        said = " ".join(self._masked(answer.decode(errors="replace")).split())[:LONGEST_QUOTE]
        return f"status {status}{said and f', {said!r}'}"

    def _error(self, what: str) -> JudgeError:
        return JudgeError(self._masked(f"{self._key}: {self._url} {what}"))

    def _masked(self, text: str) -> str:
        return text.replace(self._secret, "***") if self._secret else text


def _rating_of(choice: Mapping[str, Any]) -> float:
    """Return the rating in a chat model's message, whose content may be in parts; NaN if it was cut off.

    choice: item of ``choices`` in a reply of OpenAI's API. Raises LookupError or TypeError if it contains no
    message.
    """
    content = choice["message"]["content"] or ""
    if choice.get("finish_reason") == "length":
        return math.nan
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    found = rating(answer_in(text))
    # A reply that does not begin with a thought may still mention </think>, after its rating.
    is_mention = math.isnan(found) and not text.lstrip().startswith("<think>")
    return rating(text) if is_mention else found


def rating(text: str) -> float:
    """Return the last number in the text of a judge; NaN if there is none. 8/10 and 8 out of 10 are 8.

    If the text begins or ends with a JSON object, and has exactly one JSON field named score, rating or
    reward, that field's number counts instead. JSON within a sentence does not count: it may be a quotation.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    if JSON_FIRST_OR_LAST.search(text) and len(fields := FIELD.findall(text)) == 1:
        return float(fields[0].replace(",", ""))
    for said in (SCALE.sub(" ", text), text):
        numbers = NUMBER.findall(BEST.sub(r"\1", said))
        if numbers:
            return float(numbers[-1].replace(",", ""))
    return math.nan


def _secret(key: str, variable: str | None) -> str:
    """Return the judge's API key from the environment; empty if it needs none.

    variable: name of the environment variable; None: no key. Raises ConfigError if the key is missing or
    invalid.
    """
    if variable is None:
        return ""
    secret = os.environ.get(variable, "").strip()
    if not secret:
        raise ConfigError(
            f"{key}.key_variable={variable} is not set in the environment: export it where the run is started"
        )
    if not (secret.isascii() and secret.isprintable()):
        raise ConfigError(f"{key}.key_variable={variable} has characters that no key has: correct it")
    return secret


def _reason(error: BaseException) -> str:
    """Return the message of the first cause of an error, which is often more precise than httpx's own."""
    while not isinstance(error, TimeoutError) and (cause := error.__cause__ or error.__context__):
        error = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause
    if isinstance(error, ConnectionError) and error.errno:
        return os.strerror(error.errno)  # asyncio's message begins with a long address
    return str(error) or type(error).__name__
