"""Summaries of Reddit posts (TL;DR, Stiennon et al. 2020, arXiv 2009.01325), judged by a reward model.

A row of the data has ``query`` and ``reference_response``:

    query               SUBREDDIT: r/… TITLE: … POST: … TL;DR:
    reference_response  a summary written by a person, with or without <|endoftext|> at its end

The data are OpenAI's, in filtered form on the Hugging Face hub, or local JSONL files with these two fields.
In evaluations, which are greedy, a completion wins if the gold reward model prefers it to the summary that
the person wrote.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal, get_args

from pydantic import Field

from tba_hpc.config import TaskSection
from tba_hpc.core.ports import Tokenizer
from tba_hpc.core.types import Completion, Prompt, Resource, Split
from tba_hpc.tasks.data import HubData, Table, hub_resources, named_in_options, sources_of
from tba_hpc.tasks.rows import Rows

if TYPE_CHECKING:  # text_models imports torch, which is slow and not needed for prompts
    from tba_hpc.tasks.text_models import RewardModel

HUB_NAME = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
HUB: dict[Split, HubData] = {split: HubData(HUB_NAME, None, split) for split in get_args(Split)}
ROW = "a JSON object with the texts 'query' and 'reference_response'"
END_OF_TEXT = "<|endoftext|>"
"""Text at the end of published summaries. It is removed, whatever the tokenizer."""

Post = tuple[str, str]
"""A post, and a person's summary of it, without END_OF_TEXT."""

PenaltyMode = Literal["replace", "add"]


class TLDR(Rows[None]):
    """Task with a reward model's reward, and a penalty for completions that do not end by themselves."""

    score_name = "win rate"
    longest_call = math.inf  # its first calls load models

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        train_file: str | None = None,
        test_file: str | None = None,
        reward_model: str,
        gold_model: str | None = None,
        eos_penalty: Annotated[float, Field(ge=0)] = 1.0,
        eos_penalty_mode: PenaltyMode = "replace",
        batch: Annotated[int, Field(ge=1)] = 32,
        validation_posts: Annotated[int, Field(ge=1)] = 256,
    ) -> None:
        """Make a task from the config's options.

        train_file, test_file: local JSONL files with the rows for training and for tests; None: the hub's
        data.
        reward_model: model that judges in training. gold_model: model that judges in evaluations; None: the
        reward model.
        eos_penalty: penalty for a completion that does not end by itself. eos_penalty_mode: "replace": its
        reward is −eos_penalty (−1 as published). "add": its reward is the reward model's, minus the penalty.
        batch: texts per forward pass. validation_posts: number of posts of train_file to hold out for
        validation; the hub's data have a validation split.
        """
        super().__init__(tokenizer)
        self._table = Table(
            sources=_sources(train_file, test_file),
            parse=_parse,
            wanted=ROW,
            held_out=validation_posts,
            key="task.options.validation_posts",
        )
        self._names = reward_model, gold_model
        self._eos_penalty, self._eos_penalty_mode = eos_penalty, eos_penalty_mode
        self._batch = batch
        self._wanted: dict[str, float] = {}  # gold rewards of people's summaries, by post and summary

    def rows(self, split: Split) -> Iterator[tuple[str, str, None]]:
        """Yield (post, person's summary, None) for all posts of a split. Raises ConfigError for bad data."""
        return ((query, summary, None) for query, summary in self._table.rows(split))

    @classmethod
    def resources(cls, task: TaskSection) -> list[Resource]:
        """Return both reward models, and the hub's data for splits without a file."""
        models = named_in_options(task, "model", "reward_model", "gold_model")
        return [*models, *hub_resources(task, _sources(task.train_file, task.test_file))]

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Return the reward of each summary, including any penalty. The model reads post and summary."""
        texts = [self._text(self._reward_model, prompt, completion) for completion in completions]
        adds = self._eos_penalty_mode == "add"
        return [
            reward if completion.finish_reason == "stop" else (reward if adds else 0.0) - self._eos_penalty
            for reward, completion in zip(self._reward_model(texts), completions, strict=True)
        ]

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Return whether the gold model prefers each completion to the person's summary of the same post.

        A person's summary is judged only once, and a completion equal to it gets the same reward. If both
        were judged, their rewards could differ in the last digits, which depend on the batch.
        """
        gold, known, answers = self._gold_model, self._wanted, zip(prompts, completions, strict=True)
        mine = [self._text(gold, prompt, completion) for prompt, completion in answers]
        theirs = [gold.ended(f"{self._decode(prompt.tokens)}{prompt.target}") for prompt in prompts]
        new = list(dict.fromkeys(text for text in theirs if text not in known))
        rewards = gold([*mine, *new])
        known.update(zip(new, rewards[len(mine) :], strict=True))
        return [
            known.get(own, reward) > known[other]
            for own, reward, other in zip(mine, rewards[: len(mine)], theirs, strict=True)
        ]

    @cached_property
    def _reward_model(self) -> RewardModel:
        return self._load(self._names[0], "task.options.reward_model")

    @cached_property
    def _gold_model(self) -> RewardModel:
        name = self._names[1]
        if name is None:
            return self._reward_model
        return self._load(name, "task.options.gold_model")

    def _load(self, name: str, key: str) -> RewardModel:
        from tba_hpc.tasks.text_models import RewardModel

        return RewardModel(name, batch=self._batch, key=key)

    def _text(self, model: RewardModel, prompt: Prompt, completion: Completion) -> str:
        text = f"{self._decode(prompt.tokens)}{self.text(completion)}"
        return model.ended(text) if completion.finish_reason == "stop" else text


def _sources(train_file: str | None, test_file: str | None) -> dict[Split, str | HubData]:
    """Return the source of each split. The test split is the hub's unless ``test_file`` is given."""
    return {"test": HUB["test"], **sources_of(train_file, test_file, HUB)}


def _parse(row: Mapping[str, object]) -> Post | None:
    query, summary = row.get("query"), row.get("reference_response")
    if not isinstance(query, str) or not isinstance(summary, str):
        return None
    summary = summary.removesuffix(END_OF_TEXT)
    return (query, summary) if query.strip() and summary.strip() else None
