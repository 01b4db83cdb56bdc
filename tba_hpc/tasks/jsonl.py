"""Prompts from a JSONL file, with the user's own rewards: functions, judges, programs.

Each row is a JSON object. Its fields fill in the template of the prompt, and rewards receive them:

    {"prompt": "What is 2 + 3?", "answer": "5"}

A prompt may also be a list of messages, each with a role and a content, for the model's chat template.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from tba_hpc.config import ConfigError, RewardSection
from tba_hpc.core.ports import MEAN_REWARD, ChatTokenizer, Tokenizer
from tba_hpc.core.types import Completion, Prompt, Split
from tba_hpc.core.wording import did_you_mean
from tba_hpc.tasks.data import Table, sources_of
from tba_hpc.tasks.fields import (
    Fields,
    Unusable,
    as_text,
    filled_in,
    require_messages,
    require_text,
    row_in,
)
from tba_hpc.tasks.judge import Judge
from tba_hpc.tasks.rewards import Function, make_rewards
from tba_hpc.tasks.rows import Rows

log = logging.getLogger(__name__)

PROMPT = "{prompt}"
"""Default template: the row's prompt, unchanged."""

OWN = "environment"
"""Name of the reward that an environment itself gives."""

INSTRUCTING = ("system", "developer", "user")
"""Roles of messages whose text a chat template must show. An assistant's thoughts may be dropped."""


class Jsonl(Rows[Fields]):
    """Task whose reward is a weighted sum of the rewards that the config names.

    A completion that the token limit cut off gets 0 from each reward, unless ``judge_truncated`` is set.

    own_reward: True if the environment's own reward of a completion is added to the sum, even if the
    completion was cut off. If the environment's reward is NaN, the sum is NaN, and the named rewards do not
    see the completion.
    """

    own_reward = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reward: Mapping[str, RewardSection],
        train_file: str | None = None,
        test_file: str | None = None,
        template: str = PROMPT,
        target: str = "answer",
        chat: bool = False,
        correct_from: float | Annotated[dict[str, float], Field(min_length=1)] | None = None,
        judge_truncated: bool = False,
        validation_prompts: Annotated[int, Field(ge=1)] = 64,
    ) -> None:
        """Make a task from the config's options. Raises ConfigError.

        reward: the rewards by name. template: text of the prompt, with {name} for the row's field of that
        name. target: field with the right answer, if any; it is only displayed. chat: apply the model's chat
        template to the prompt, as a user's message, or to its list of messages. correct_from: lowest reward
        of an answer that counts as correct in evaluations, or the lowest value of each reward in a mapping,
        without weights. None means 1 if there is one reward; if there are several, evaluations report only
        the mean reward. judge_truncated: also ask the rewards about completions that the token limit cut off.
        validation_prompts: number of rows of train_file to hold out for each split without a source of its
        own.
        """
        super().__init__(tokenizer, chat=chat)
        name = type(self).__name__.lower()
        if not reward and not self.own_reward:
            raise ConfigError(
                f"the task {name} has no reward: set task.reward=module:function, of a module beside the "
                "config"
            )
        if train_file is None:
            raise ConfigError(f"the task {name} has no prompts: set task.train_file to a JSONL file")
        self._rewards = make_rewards(reward)
        self._functions = [one for one in self._rewards.values() if isinstance(one, Function)]
        self._needed = set(re.findall(r"\{(\w+)\}", template))
        fields = sorted(self._needed.union(*(function.arguments.needs for function in self._functions)))
        self._table = Table(
            sources=sources_of(train_file, test_file, {}),
            parse=self._checked,
            wanted=f"a JSON object with the fields of task.options.template and rewards: {', '.join(fields)}",
            held_out=validation_prompts,
            key="task.options.validation_prompts",
            identity=self.identity,
        )
        self._for_messages = {
            f"'task.options.template=\"{PROMPT}\"'": template == PROMPT,  # as --set and a shell need it
            "task.options.chat=true": chat,
        }
        self._judged = {
            name for section in reward.values() for name in re.findall(r"\{(\w+)\}", section.prompt or "")
        }
        self._weights = {name: section.weight for name, section in reward.items()}
        if self.own_reward:
            self._weights[OWN] = 1.0
        if not self._functions:
            self.longest_call = math.inf  # judges and programs have their own time limits
        self._template, self._target = template, target
        self._correct_from = 1.0 if correct_from is None else correct_from
        if isinstance(correct_from, Mapping):
            _require_rewards(correct_from, [*self._weights])
        if len(self._weights) > 1 and correct_from is None and type(self).correct is Jsonl.correct:
            self.score_name = MEAN_REWARD
        self._judge_truncated = judge_truncated
        self._parts: dict[str, list[float]] = {}
        self._grades: list[float] = []

    def rows(self, split: Split) -> list[tuple[str, str, Fields]]:
        """Return (prompt's text, target, row) for each row of a split. Raises ConfigError for bad data.

        If the prompt is a list of messages, its text is what the chat template makes of them.
        """
        found = self._table.rows(split)
        self._tell_blank(split, found)
        texts = [self.shown(row) for row in found]
        self._tell_left_out(split, found, texts)
        return [(text, as_text(row.get(self._target)), row) for row, text in zip(found, texts, strict=True)]

    def _tell_left_out(self, split: Split, rows: Sequence[Fields], texts: Sequence[str]) -> None:
        """Log a warning if the chat template leaves out messages, as some do if they do not know a role.

        texts: the rendered prompts of the ``rows``.
        """
        lost = [
            message
            for row, text in zip(rows, texts, strict=True)
            for message in self.given_messages(row) or ()
            if message["role"] in INSTRUCTING and message["content"].strip() not in text
        ]
        if lost:
            log.warning(
                "the chat template leaves out %d messages of %s rows, such as %.60r of the role %r: "
                "put the text into a user's message, or set another chat_template in tokenizer_config.json",
                *(len(lost), split, lost[0]["content"], lost[0]["role"]),
            )

    def _tell_blank(self, split: Split, rows: Sequence[Fields]) -> None:
        """Log a warning if a field that a reward function needs is null or a blank text in some rows."""
        for function in self._functions:
            for name in function.arguments.needs:
                blank = [n for n, row in enumerate(rows, 1) if not as_text(row[name]).strip()]
                if blank:
                    log.warning(
                        "%s takes %r, which is null or blank in %d of %d %s rows, such as row %d: leave such "
                        "rows out unless that is intended",
                        *(function.key, name, len(blank), len(rows), split, blank[0]),
                    )

    def identity(self, row: Fields) -> str:
        """Return a string that is equal for rows with the same question, whatever their spacing."""
        return repr([" ".join(as_text(row.get(name)).split()) for name in self._needed])

    def shown(self, row: Fields) -> str:
        """Return the text of a row's prompt. Raises ConfigError if the chat template refuses its messages."""
        messages = self.given_messages(row)
        if messages is None:
            return filled_in(self._template, row)
        return self.chat_tokenizer(self._tokenizer).render(messages, tools=(), ask=True)

    def encoded(self, text: str, row: Fields) -> np.ndarray:
        """Encode the text of a row's prompt, int32 [T]. A rendered chat gets no further special tokens."""
        if self.given_messages(row) is None:
            return super().encoded(text, row)
        return self.chat_tokenizer(self._tokenizer).encode_rendered(text)

    def given_messages(self, row: Fields) -> list[Any] | None:
        """Return a row's list of messages; None if its prompt is a text, or if a template is set."""
        given = row.get("prompt")
        return given if isinstance(given, list) and self._template == PROMPT else None

    def chat_tokenizer(self, tokenizer: Tokenizer) -> ChatTokenizer:
        """Return ``tokenizer``. Raises ConfigError if it cannot render chats."""
        if not isinstance(tokenizer, ChatTokenizer):
            raise ConfigError(
                f"the task {type(self).__name__.lower()} needs a chat template, which the tokenizer of "
                "model.path cannot render: let it have the methods of ports.ChatTokenizer"
            )
        return tokenizer

    def _checked(self, row: Fields) -> Fields:
        """Return the row unchanged. Raises Unusable if it makes no prompt, or if a reward cannot use it.

        A field of the template must be a number, a text that is not blank, or the prompt's messages. A field
        that a judge's prompt shows must not be null, and one that a function needs must be there.
        """
        self._require_prompt(row)
        for name in sorted(self._judged & row.keys()):
            if row[name] is None:
                raise Unusable(f"{name!r} is null, but the judge is to see it")
        for function in self._functions:
            function.arguments.require(row)
        return row

    def _require_prompt(self, row: Fields) -> None:
        """Raise Unusable if a field of the template is neither text nor the prompt's messages."""
        lacking = [key for key, is_set in self._for_messages.items() if not is_set]
        for name in sorted(self._needed):
            value = row.get(name)
            if not isinstance(value, list) or name != "prompt":
                require_text(row, name)
            elif lacking:
                raise Unusable(f"'prompt' is a list of messages, which needs {' and '.join(lacking)}")
            else:
                require_messages(value, name)

    def encode_question(self, text: str) -> np.ndarray:
        """Encode a user's question, int32 [T]. Raises ConfigError for a row that makes no prompt.

        A JSON object with all fields of the template is a row of the data. Any other question is filled in if
        the template has exactly one field; otherwise the prompt is the question alone.
        """
        row = row_in(text)
        if row and self._needed <= row.keys():
            try:
                self._require_prompt(row)
            except Unusable as error:
                raise ConfigError(f"the question cannot be used as a row: {error}") from None
            return self.encoded(self.shown(row), row)
        one = len(self._needed) == 1
        whole = filled_in(self._template, dict.fromkeys(self._needed, text)) if one else text
        return self._encode(whole)

    def try_rewards(self, seconds: float = math.inf) -> None:
        """Try each judge and each function on the first training row. Programs are not tried.

        seconds: time limit of a call. Raises ConfigError if a judge is unreachable, or if a function cannot
        be called with this row or returns no number.
        """
        row = self.row(self.prompts("train")[0])
        for reward in self._rewards.values():
            if isinstance(reward, Judge):
                reward.try_on(row)
            elif isinstance(reward, Function):
                reward.try_on(row, seconds)
        if len(self._weights) > 1:
            log.info(self._sum_in_words())

    def _sum_in_words(self) -> str:
        """Return a sentence on the weights of the rewards, and on which answers count as correct."""
        parts = " + ".join(f"{weight:g} × {name}" for name, weight in self._weights.items())
        least = self._correct_from
        if type(self).correct is not Jsonl.correct:
            which = "as the task says"
        elif isinstance(least, Mapping):
            which = f"if {' and '.join(f'{name} ≥ {value:g}' for name, value in least.items())}"
        elif self.score_name == MEAN_REWARD:
            which = "only if task.options.correct_from says from which reward or sum on"
        else:
            which = f"if this sum ≥ {least:g} (task.options.correct_from)"
        return f"the reward is {parts}; evaluations count an answer as correct {which}"

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Return the weighted sum of all rewards for each completion; see also ``reward_parts``."""
        return self._judge([prompt] * len(completions), completions)

    def reward_parts(self) -> Mapping[str, Sequence[float]]:
        """Return, by name, the unweighted rewards that the last ``rewards`` or ``correct`` computed.

        Each reward has one number per completion of that call. The result is empty for a single reward.
        """
        return self._parts if len(self._parts) > 1 else {}

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Return whether the reward of each completion (see ``grades``) reaches ``correct_from``."""
        self._grades, least = self._judge(prompts, completions), self._correct_from
        if isinstance(least, Mapping):
            which = range(len(completions))
            return [all(self._parts[name][i] >= value for name, value in least.items()) for i in which]
        return [reward >= least for reward in self._grades]

    def grades(self) -> list[float]:
        """Return the rewards that the last call of ``correct`` computed."""
        return self._grades

    def _judge(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        failed = [
            completion.reward is not None and math.isnan(completion.reward) for completion in completions
        ]
        whole = [
            not fault and (self._judge_truncated or completion.finish_reason == "stop")
            for completion, fault in zip(completions, failed, strict=True)
        ]
        answers = [
            (self.row(prompt), self.text(completion))
            for prompt, completion, judged in zip(prompts, completions, whole, strict=True)
            if judged
        ]
        self._parts = {}
        for name, reward in self._rewards.items():
            found = iter(reward(answers) if answers else [])
            self._parts[name] = [next(found) if judged else 0.0 for judged in whole]
        if self.own_reward:
            self._parts[OWN] = [completion.reward or 0.0 for completion in completions]
        weights = self._weights.items()
        return [
            math.nan if fault else sum(weight * self._parts[name][i] for name, weight in weights)
            for i, fault in enumerate(failed)
        ]


def _require_rewards(correct_from: Mapping[str, float], known: Sequence[str]) -> None:
    """Raise ConfigError if ``correct_from`` names a reward that is not ``known``."""
    for name in correct_from:
        if name not in known:
            remedy = did_you_mean(name, known)
            raise ConfigError(f"task.options.correct_from: the task has no reward {name}: {remedy}")
