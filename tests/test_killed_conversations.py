"""A run of conversations that is killed at each of their turns, goes on, and has lost and doubled nothing.

A turn is a letter of the table's completions, between which the environment says nothing.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import tabular_run
from lab.tabular import TabularGenerator
from tabular_run import STEPS, TABLE, start

from tba_hpc.core.ports import Message
from tba_hpc.core.types import Completion, Group, Prompt, Request
from tba_hpc.environments.chat import Chat
from tba_hpc.environments.contract import Session
from tba_hpc.environments.conversations import Conversations
from tba_hpc.environments.task import Environment
from tba_hpc.report.audit import audit
from tba_hpc.run.directory import RunDir

NTH = 100
"""From so many turns of their kind on, conversations of all places are open."""


class Letters(TabularGenerator):
    """Samples one letter a request, whose prompt holds the earlier ones."""

    def __init__(self, seed: int) -> None:
        super().__init__(TABLE, seed=seed)
        self._asked: list[Request] = []

    @property
    def in_flight(self) -> int:
        """Letters."""
        return len(self._asked)

    def submit(self, request: Request) -> None:
        """Queue one."""
        self._asked.append(request)

    def step(self) -> list[Group]:
        """All that are queued."""
        asked, self._asked = self._asked, []
        return [self._letter(request) for request in asked]

    def _letter(self, request: Request) -> Group:
        said = np.append(request.prompt.tokens[1:], 0)[None]
        place = request.prompt.id, TABLE.prefixes(said)[0, -1]
        logprob_V = TABLE.next_logprobs(self._logits_PSV[place])
        token = (
            logprob_V.argmax()
            if not request.sampling.temperature
            else self._rng.choice(len(logprob_V), p=np.exp(logprob_V))
        )
        letter = Completion(np.array([token], np.int32), logprob_V[[token]].astype(np.float32), "stop")
        return Group(request, (letter,), np.full((1, 2), self.version, np.int32))


class Deadly:
    """Ends with the completion. It kills its process at a ``turn``, once a run, when something is sealed."""

    reached = 0
    calls = failed_calls = 0

    def __init__(self, turn: int, run: Path) -> None:
        self._turn, self._run, self._done = turn, RunDir(run), run / "killed"

    def open(self) -> None:
        """Nothing is added to the prompt."""

    def act(self, text: str, messages: Sequence[Message]) -> tuple[list[Message], bool]:
        """Say nothing."""
        if len(messages) == self._turn and not self._done.exists():
            Deadly.reached += 1
            if Deadly.reached >= NTH and self._run.shard_files():
                self._done.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return [], text == str(TABLE.eos) or len(messages) == TABLE.length

    def reward(self) -> None:
        """The task knows it."""


def conversations(turn: int, run: Path, seed: int) -> Conversations:
    """Of the table, with a deadly environment."""

    def opening(prompt: Prompt, *_: object) -> tuple[Prompt, list[Message]]:
        return prompt, []

    task = SimpleNamespace(
        session=lambda _: cast(Session, Deadly(turn, run)), opening=opening, max_turns=TABLE.length
    )
    chat = SimpleNamespace(
        decode=lambda tokens: str(tokens[0]),
        bridge=lambda *_: np.zeros(0, np.int32),
        eos_token_id=TABLE.eos,
    )
    return Conversations(Letters(seed), cast(Environment, task), cast(Chat, chat), at_once=4, seconds=30)


@pytest.mark.parametrize("turn", [1, pytest.param(2, marks=pytest.mark.nightly), TABLE.length])
def test_killed_at_any_turn_a_run_has_lost_and_doubled_nothing(tmp_path: Path, turn: int) -> None:
    run = RunDir.create(tabular_run.make_config(tmp_path))
    generator = partial(conversations, turn, run.path)
    for exitcode, attempts in ((-signal.SIGKILL, 1), (0, 2)):
        process = start(run, searchers=2, generator=generator)
        process.join(90)
        verdict = audit(run)
        assert (process.exitcode, verdict.attempts) == (exitcode, attempts)
        assert verdict.problems == () and verdict.lost == verdict.doubled == 0
        assert verdict.trajectories > 0 and verdict.finished == (exitcode == 0)
    assert verdict.steps == STEPS
