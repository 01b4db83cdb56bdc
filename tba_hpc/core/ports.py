"""The interfaces between the two loops and the libraries that serve them.

Those of a run's two ends have at least two real implementations each; ``tests/contracts`` runs one suite on
all of them. Nothing here imports a heavy library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from tba_hpc.config import GeneratorSection, ModelSection
from tba_hpc.core.types import (
    Completion,
    Group,
    Prompt,
    Publication,
    Request,
    Shard,
    Split,
    TrajectoryBatch,
    WeightLayout,
    WeightUpdate,
)

PASS_AT_1 = "pass@1"
"""The score of a task with right and wrong answers."""


IDLE_DEADLINES = 6
"""A searcher gives its trainer this many deadlines between two rounds of the exchange."""


class Tokenizer(Protocol):
    """Text to tokens and back."""

    eos_token_id: int
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Tokens int32 [T] of ``text`` at the start of a sequence: begun as usual, not ended."""

    def encode_chat(self, text: str) -> np.ndarray:
        """Tokens int32 [T] of ``text`` as a user's message, up to where the model's answer begins.

        Raises ConfigError where the model has no chat template.
        """

    def decode(self, tokens: np.ndarray) -> str:
        """Text of ``tokens``, special tokens left out."""


class Task(Protocol):
    """A set of prompts and the rewards of completions.

    Optional besides: class attributes ``score_name`` and ``evaluation_temperature``, see the functions of
    these names; methods, see ``Summarising``, ``Asking`` and ``Itemising``.
    """

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """All prompts of a split, in a fixed order: ``prompts(split)[i].id == i``."""

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
        """A number for each of the sampled completions of one prompt. Called in one thread, not the main one.

        A completion whose reward is not finite is set aside, and all of them where it raises.
        """

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[bool]:
        """Whether each completion, of the prompt beside it, counts for the task's score.

        Several at once, so that a model may judge in batches. Called in the same thread as ``rewards``.
        """


@runtime_checkable
class Summarising(Protocol):
    """What a task may offer besides, for ``tba evaluate``: figures such as diversity, of many completions."""

    def summary(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Name → figure, over all completions of ``groups``."""


@runtime_checkable
class Asking(Protocol):
    """What a task may offer besides, for ``tba ask``: how it puts a question that is none of its own."""

    def encode_question(self, text: str) -> np.ndarray:
        """Tokens int32 [T] of the whole prompt."""


@runtime_checkable
class Itemising(Protocol):
    """What a task may offer besides, whose reward is a sum: what it is a sum of, for the metrics."""

    def reward_parts(self) -> Mapping[str, Sequence[float]]:
        """Name → a number for each completion of the last call of ``rewards``; called right after it."""


def score_name(task: Task) -> str:
    """What a task calls its score, the share of prompts answered correctly: pass@1 where it does not say."""
    return str(getattr(task, "score_name", PASS_AT_1))


def evaluation_temperature(task: Task) -> float:
    """Temperature at which evaluation prompts are answered: 0, greedy, where the task does not say."""
    return float(getattr(task, "evaluation_temperature", 0.0))


class Victim(Protocol):
    """A fixed model that a task asks, beside the policy: the one that red-teaming tests."""

    def answers(self, texts: Sequence[str]) -> list[list[str]]:
        """Sampled answers to each text, equally many. Waits for the last of them; any thread may call it.

        Raises ConfigError where the model cannot be served, EngineError where it dies again and again.
        """


class Serve(Protocol):
    """Makes a Victim; what a task gets whose constructor has an argument ``serve``."""

    def __call__(
        self, model: ModelSection, generator: GeneratorSection, *, chat: bool, keys: Sequence[str]
    ) -> Victim:
        """Begin to serve ``model``. Raises ConfigError.

        generator: how it samples, how many answers to a text (completions_per_prompt), its memory.
        chat: texts are a user's messages in the model's chat template. keys: of the config, that of the path
        first, then those to look at where it cannot be served, for errors.
        """


class Generator(Protocol):
    """A policy that samples, by continuous batching: submit requests, step, take finished groups."""

    version: int
    """Version of the weights in use."""
    load_seconds: float
    """Time that generation stood still for the last load, s."""
    busy_seconds: float
    """Time spent generating so far, s."""
    rebuilds: int
    """Times that a dead engine was replaced."""

    @property
    def loading(self) -> bool:
        """Whether the last ``load`` is still under way; another one would wait for it."""

    @property
    def in_flight(self) -> int:
        """Completions submitted that have not ended yet, or whose group ``step`` has not returned yet."""

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError where prompt and completion exceed the context."""

    def step(self) -> list[Group]:
        """Let generation go on for a moment; return the groups that are now whole."""

    def load(self, update: WeightUpdate) -> None:
        """Replace the weights in place. Requests in flight, and those to come, go on under the new weights.

        ``update`` has been copied on return; ``loading`` tells until when the old weights are in use.
        """

    def close(self) -> None:
        """Release the engine."""


class Reference(Protocol):
    """The reference policy π_ref. Called in one thread, not the main one."""

    step: int
    """Which policy it is: that of an optimizer step (0: the initial one), or BEHAVIOUR."""
    has_model: bool
    """Whether it computes anything: else what it says is what sampled, or NaN for the trainer to replace."""

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]: log-probability of each token at model.logprob_temperature."""

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """As ``logprobs``, of every group, under other weights; the reference stays what it is.

        ``weights.data`` may change meanwhile, and is what it was on return.
        """

    def load(self, step: int) -> None:
        """Become the policy of ``step``, which the trainer has exported."""


class ShardSink(Protocol):
    """Where a searcher's scored groups go until they are sealed. Called in one thread, not the main one."""

    @property
    def age(self) -> float:
        """Seconds that the oldest unsealed completion has waited; 0 where there is none."""

    def append(
        self, group: Group, rewards: list[float], ref_logprobs: list[np.ndarray], *, reference: int
    ) -> None:
        """Add a group to the open shard; ``reference``: whose log-probabilities these are."""

    def seal(self) -> Shard | None:
        """Make the open shard durable and return it; None where it is empty."""


class Learner(Protocol):
    """The policy under training. Only the leading trainer rank holds one; the others follow.

    Every method raises ExchangeError where another trainer rank is gone.
    """

    layout: WeightLayout

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """One optimizer step on whole groups; returns metrics of the step (loss, norm, rate taken …).

        Where loss or gradient norm is not finite, none is taken and ``skipped_steps`` counts it; see there.
        """

    def reference_logprobs(self, batch: TrajectoryBatch, step: int) -> np.ndarray:
        """float32 [T]: log π_ref of the completions' tokens, rows in order, under the reference of ``step``.

        Where the trainer is to compute them: the initial policy (0), one that it has exported, or, where the
        reference is an average of the policy, what that is now (BEHAVIOUR).
        """

    def write_weights(self, out: np.ndarray) -> None:
        """Copy the current weights into ``out``, uint8 [layout.nbytes]; back when all of it is written."""

    def save(self, folder: Path) -> Callable[[], str]:
        """Copy everything needed to go on exactly (weights, optimizer); returns what writes it.

        That is called once, before the next ``save``, in any thread, and beside training unless
        checkpoint.snapshot says otherwise. It writes into ``folder``, which exists, and is back when all
        ranks have: with the lines of the inventory of files that are summed up by then. Raises StateError
        where they cannot be written, and DiskFullError where that is for want of room, after which ``save``
        may be called again.
        """

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""

    def export(self, folder: Path) -> None:
        """Write a folder that ``from_pretrained`` and ``vllm serve`` load, tokenizer included."""

    def close(self) -> None:
        """Let the following ranks go."""


class SharedLearner(Learner, Protocol):
    """A learner of which every trainer rank holds a part."""

    def follow(self, slot: Callable[[], np.ndarray]) -> None:
        """Obey the leader until it closes the learner.

        ``slot`` gives the uint8 buffer [layout.nbytes] that this rank's part of the weights goes into: it is
        called once for each ``write_weights`` of the leader.
        """


class Backend(Protocol):
    """What ``model.path`` stands for: a policy, by what it is trained and by what it is sampled.

    The usual one, of Hugging Face models, is the runtime's. One of your own is a class that is called with
    the run's Config and named as ``model.path=module:Class``; the module is found where reward functions are.
    """

    def tokenizer(self) -> Tokenizer:
        """A new one: each is used in one thread."""

    def generator(self, *, seed: int) -> Generator:
        """A searcher's."""

    def reference(self, folder_of: Callable[[int], Path]) -> Reference:
        """The initial policy, in a searcher; ``folder_of``: where those that become it are exported."""

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """A trainer rank's; ``store``: a private folder, new for this attempt, that all of them share."""


class TrainerExchange(Protocol):
    """The leading trainer's end of the exchange. No call waits for a searcher, except ``close``."""

    def publish(self, publication: Publication, write: Callable[[np.ndarray], None]) -> bool:
        """Start a round: ``write`` fills a uint8 buffer with the weights that ``publication`` is about.

        False, with nothing written, while the round before is still under way: try again later.
        Raises ExchangeError naming who is missing once a round has outlasted its deadline.
        """

    def gather(self) -> bool:
        """Start a round that only fetches shards: no weights travel (used while the buffer first fills).

        False while a round is under way; raises as ``publish`` does.
        """

    def collect(self) -> list[Shard]:
        """Shards that arrived since the last call, each exactly once, in order per searcher."""

    @property
    def stop_requested(self) -> bool:
        """Whether a searcher has been asked (by a signal) to stop the run."""

    def close(self) -> list[Shard]:
        """Finish the round under way, tell every searcher that the run is over, return the last shards."""


class SearcherExchange(Protocol):
    """A searcher's end of the exchange. No call waits."""

    def offer(self, shard: Shard) -> None:
        """Hand over a shard that is already sealed on disk."""

    def poll(self) -> WeightUpdate | None:
        """The newest weights not seen before, if any. They stay valid until the next call."""

    def request_stop(self) -> None:
        """Ask the trainer to stop the run at its next safe point; or nothing, where only this one leaves."""

    @property
    def pending(self) -> int:
        """Shards offered and not yet merged: the bound for back-pressure."""

    @property
    def closed(self) -> bool:
        """Whether the trainer has ended the run and every published weight has been polled."""

    def close(self) -> None:
        """Leave. Shards not yet merged stay on disk and are merged by a resume."""


class EngineError(RuntimeError):
    """The engine died again and again; the message says how often and why."""


class ExchangeError(RuntimeError):
    """A peer is missing: the message names who, for how long, and the likely cause."""
