"""Interfaces between the two loops and the rest: task, engine, reference, learner, exchange.

Both transports of the exchange pass the same tests, ``tests/contracts``. Imports no heavy library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from tba_hpc.config import ConfigError, GeneratorSection, ModelSection
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
"""Name of the score of a task with right and wrong answers."""

RIGHT_AND_ENDED = "right and ended"
"""Name of the share of answers that are correct and not truncated."""

IDLE_DEADLINES = 6
"""Longest pause between two rounds of the exchange, after which a searcher gives up on its trainer, as a
multiple of launch.timeout_seconds."""


class Tokenizer(Protocol):
    """Converter of text to tokens and back."""

    eos_token_id: int
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of ``text`` at the start of a sequence: with any BOS, without EOS."""

    def encode_chat(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of a chat that ends where the model must answer ``text``.

        Raises ConfigError if the model has no chat template.
        """

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of ``tokens``, without special tokens."""


@runtime_checkable
class WholeTokenizer(Tokenizer, Protocol):
    """A tokenizer that can also show special tokens, as task.special_tokens requires."""

    def decode_whole(self, tokens: np.ndarray) -> str:
        """Return the text of ``tokens``, special tokens included."""


def decoder(tokenizer: Tokenizer, *, special: bool) -> Callable[[np.ndarray], str]:
    """Return a function from tokens, int32 [T], to text.

    special: show special tokens, except an EOS at the end. Raises ConfigError if the tokenizer cannot.
    """
    if not special:
        return tokenizer.decode
    if not isinstance(tokenizer, WholeTokenizer):
        raise ConfigError(
            "the tokenizer of model.path cannot show special tokens: give it the method of "
            "ports.WholeTokenizer, or set task.special_tokens=false"
        )
    whole, end = tokenizer.decode_whole, tokenizer.eos_token_id
    return lambda tokens: whole(tokens[:-1] if tokens[-1:].tolist() == [end] else tokens)


Message = dict[str, Any]
"""A chat message: role, content, and any other fields that the chat template uses."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with the model's chat template."""

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], ask: bool, **options: Any
    ) -> str:
        """Return the text of a conversation.

        ask: add the beginning of the model's next message. options: variables of the chat template. Raises
        ConfigError if the model has no chat template, or if the template refuses the messages.
        """

    def encode_rendered(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of rendered text, with nothing added at its start or end."""


class Task(ABC):
    """A set of prompts and the rewards of completions.

    The first three methods are required. No task's class need derive from this one:
    ``task_contract.with_defaults`` adds the other methods.

    score_name: name of the share of prompts answered correctly. evaluation_temperature: sampling temperature
    of evaluations; 0 is greedy. longest_call: time limit of a call of ``rewards`` or ``correct``, s; None:
    the run's. It is infinite for a task whose calls load models, or which sets time limits itself.
    """

    score_name: str = PASS_AT_1
    evaluation_temperature: float = 0.0
    longest_call: float | None = None

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return all prompts of a split, in a fixed order: ``prompts(split)[i].id == i``."""

    @abstractmethod
    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
        """Return the reward of each completion of one prompt. Always called in the same background thread.

        A completion whose reward is not finite is set aside. If this method raises, all of them are.
        """

    @abstractmethod
    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[bool]:
        """Return whether each completion is correct. Called in the same thread as ``rewards``."""

    def reward_parts(self) -> Mapping[str, Sequence[float]]:
        """Return the named terms whose sum is the reward, for the metrics.

        Called right after ``rewards``; each term has a number per completion of that call.
        """
        return {}

    def grades(self) -> Sequence[float]:
        """Return the rewards of an evaluation's answers, or () if answers are only right or wrong.

        Called right after ``correct``, with a reward per completion of that call.
        """
        return ()

    def summary(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return further statistics of all completions, by name, such as diversity, for tba evaluate."""
        return {}

    def encode_question(self, text: str) -> np.ndarray | None:
        """Return the prompt, int32 [T], for a question asked by tba ask; None: the tokens of the text."""
        return None

    def converse(self, generator: Generator, tokenizer: Tokenizer) -> Generator:
        """Return a generator of whole conversations that uses ``generator`` for the turns.

        A task without an environment returns ``generator`` itself. tokenizer: used in the caller's thread.
        """
        return generator

    def question(self, text: str) -> Prompt:
        """Return the prompt of a conversation about a user's question. Only called if ``converse`` wraps."""
        raise NotImplementedError

    def show_special_tokens(self) -> None:
        """Decode completions with their special tokens from now on. Raises ConfigError if it cannot."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        raise ConfigError(
            f"task.special_tokens would be ignored by the task {name}: give it the method "
            "show_special_tokens() of ports.Task"
        )


class Victim(Protocol):
    """A fixed model, other than the policy, that a task queries, such as the target of red-teaming."""

    def answers(self, texts: Sequence[str]) -> list[list[str]]:
        """Return sampled answers to each text, the same number for each. Blocks; any thread may call it.

        Raises ConfigError if the model cannot be served, or EngineError if the engine keeps dying.
        """


class Serve(Protocol):
    """Function that makes a Victim; tasks whose constructor has an argument ``serve`` are given one."""

    def __call__(
        self, model: ModelSection, generator: GeneratorSection, *, chat: bool, keys: Sequence[str]
    ) -> Victim:
        """Begin to serve ``model``. Raises ConfigError.

        generator: sampling parameters, memory, and the number of answers to a text (completions_per_prompt).
        chat: whether the chat template turns each text into a user's message. keys: config keys that errors
        name; the first is that of the model's path.
        """


class Generator(Protocol):
    """A policy that samples by continuous batching: submit requests, step, take finished groups.

    version: version of the weights in use. load_seconds: pause of generation for the last load.
    busy_seconds: time spent generating so far. rebuilds: number of dead engines replaced.

    Optional attributes: nan_groups: number of groups sampled again because a log-probability was NaN.
    recompute_share: share of all computed tokens that repeated earlier work because weights were loaded.
    stage: what the engine is doing while it starts; empty once it can sample.
    """

    @property
    def version(self) -> int: ...

    @property
    def load_seconds(self) -> float: ...

    @property
    def busy_seconds(self) -> float: ...

    @property
    def rebuilds(self) -> int: ...

    @property
    def loading(self) -> bool:
        """True while a ``load`` is in progress."""

    @property
    def in_flight(self) -> int:
        """Number of unfinished completions, plus that of finished groups that ``step`` has yet to return."""

    def submit(self, request: Request) -> None:
        """Queue a request. Completions must have ``top_logprobs`` if ``request.sampling`` asks for them.

        Raises ValueError if prompt and completion exceed the context length.
        """

    def step(self) -> list[Group]:
        """Generate for a short time; return the groups that are now complete."""

    def load(self, update: WeightUpdate) -> None:
        """Replace the weights in place; requests in flight continue under the new weights.

        The old weights stay in use while ``loading``.
        """

    def close(self) -> None:
        """Release the engine."""


class Reference(Protocol):
    """The reference policy π_ref. Always called in the same background thread.

    step: optimizer step of this policy; 0 is the initial one.
    """

    step: int

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return, per group and completion, each token's log-probability, float32 [T].

        They are taken at model.logprob_temperature. Values at an environment's tokens are ignored.
        """

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Compute ``logprobs_of`` groups under other weights; ``weights.data`` stays unchanged."""

    def load(self, step: int) -> None:
        """Load the policy that the trainer exported at ``step``."""


class Learner(Protocol):
    """The policy under training. Only the leading trainer rank holds one; the others follow.

    Every method raises ExchangeError if another trainer rank is gone.
    """

    layout: WeightLayout

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """Take one optimizer step on the mean loss over all rows of ``batch``; return its metrics.

        The metrics are: loss and the objective's own, as means over the batch; the ``figures`` of the batch;
        grad_norm before clipping; tokens of the completions; learning_rate; skipped_steps so far. If loss or
        norm is not finite, weights and optimizer stay as they are, and the norm returned is not finite.
        Raises ConfigError if that happens too often in a row.
        """

    def reference_logprobs(self, batch: TrajectoryBatch, step: int) -> np.ndarray:
        """Return log π_ref of all completion tokens, float32 [T], if the trainer scores the reference.

        step: optimizer step of the reference: 0, or one that was exported.
        """

    def write_weights(self, out: np.ndarray) -> Callable[[], object] | None:
        """Copy, or begin to copy, the current weights into ``out``, uint8 [layout.nbytes]; see ``Write``.

        Later steps do not change what is written.
        """

    def save(self, folder: Path) -> Callable[[], str]:
        """Copy weights and optimizer state; return a function that writes them to an existing ``folder``.

        Call the function once, in any thread, before the next ``save``. It returns once all ranks have
        written durably. Its result is the inventory's lines for files whose checksums are known by then. It
        raises StateError if writing fails, or DiskFullError if the disk is full; ``save`` may then be called
        again.
        """

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote: exactly if the number of ranks is the same, otherwise up to rounding.

        Raises StateError if the folder belongs to another model or is incomplete.
        """

    def export(self, folder: Path) -> None:
        """Write a folder that ``from_pretrained`` and ``vllm serve`` load. It appears by an atomic rename.

        With LoRA the adapter is merged into the weights, and also saved in the subfolder ``adapter.FOLDER``.
        """

    def close(self) -> None:
        """Release the ranks that follow."""


class SharedLearner(Learner, Protocol):
    """A learner that is sharded over all trainer ranks."""

    def follow(self, slot: Callable[[], np.ndarray] | None) -> None:
        """Carry out the leader's calls until it closes the learner.

        slot: called once per ``write_weights`` of the leader. It returns the buffer, uint8 [layout.nbytes],
        for this rank's part of the weights. None: the leader writes all of them, as without Config.one_world.
        """


class Backend(Protocol):
    """Implementation of a policy's training and sampling, chosen by ``model.path``.

    The default is in ``engine.hf_backend``. Your own is a class named by ``model.path=module:Class`` and
    constructed from the run's Config; the module is looked up like reward functions.
    """

    def tokenizer(self) -> Tokenizer:
        """Make a new tokenizer. Each is used in one thread only."""

    def generator(self, *, seed: int) -> Generator:
        """Make a searcher's generator."""

    def reference(self, folder_of: Callable[[int], Path]) -> Reference:
        """Make a searcher's reference, which begins as the initial policy.

        folder_of: function from a step to the folder of the policy exported then.
        """

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """Make a trainer rank's learner. store: this attempt's folder, shared by all trainer ranks."""


Write = Callable[[np.ndarray], Callable[[], object] | None]
"""Function that writes weights into a buffer, uint8. It may return before all is written; then it returns a
function that any thread can call to wait for the rest. That function raises ExchangeError if another rank is
gone."""


class TrainerExchange(Protocol):
    """The leading trainer's end of the exchange. Only ``close`` waits for searchers."""

    def publish(self, publication: Publication, write: Write) -> bool:
        """Start a round: ``write`` fills a uint8 buffer with the weights of ``publication``; see ``Write``.

        Returns False, with nothing written, while another round is in progress. Raises ExchangeError, which
        names the missing ranks, if that round has exceeded its deadline.
        """

    def gather(self) -> bool:
        """Start a round without weights, to fetch shards that the trainer waits for; see ``publish``."""

    def collect(self) -> list[Shard]:
        """Return the shards that arrived since the last call: each exactly once, each searcher's in order."""

    @property
    def stop_requested(self) -> bool:
        """True once a signal has asked a searcher to stop the run."""

    def close(self) -> None:
        """Finish the present round, and tell every searcher that the run is over.

        Shards that were not collected stay on disk, and a resume merges them.
        """


class SearcherExchange(Protocol):
    """A searcher's end of the exchange. No call waits."""

    def offer(self, shard: Shard) -> None:
        """Offer a shard, already sealed on disk, to the trainer."""

    def poll(self) -> WeightUpdate | None:
        """Return the newest weights, or None if they were returned before."""

    def request_stop(self) -> None:
        """Ask the trainer to stop the run at its next safe point. Elastic searchers leave alone instead."""

    @property
    def pending(self) -> int:
        """Number of shards offered and not yet merged, which limits how far a searcher runs ahead."""

    @property
    def ended(self) -> bool:
        """True once the trainer has ended the run, even if ``poll`` has yet to return the last weights."""

    @property
    def closed(self) -> bool:
        """True once the trainer has ended the run and ``poll`` has returned the last weights."""


class EngineError(RuntimeError):
    """Raised if the engine keeps dying; the message says how often and why."""


class ExchangeError(RuntimeError):
    """Raised if a rank is missing; the message says which, for how long, and the likely cause."""
