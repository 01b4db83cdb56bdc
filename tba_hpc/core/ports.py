"""The interfaces between the two loops and the libraries that serve them.

Both transports of the exchange pass one suite, ``tests/contracts``. Nothing here imports a heavy library.
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
"""Name of the share of answers that are correct and were not cut off by a limit."""

IDLE_DEADLINES = 6
"""Number of deadlines that a searcher gives its trainer between two rounds of the exchange."""


class Tokenizer(Protocol):
    """Converter of text to tokens and back."""

    eos_token_id: int
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Return tokens, int32 [T], of ``text`` at the start of a sequence: begun as usual, and not ended."""

    def encode_chat(self, text: str) -> np.ndarray:
        """Return tokens, int32 [T], of ``text`` as a user's message, up to the model's answer.

        Raises ConfigError if the model has no chat template.
        """

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of ``tokens``, without special tokens."""


@runtime_checkable
class WholeTokenizer(Tokenizer, Protocol):
    """A tokenizer that can show special tokens, too: what task.special_tokens needs."""

    def decode_whole(self, tokens: np.ndarray) -> str:
        """Text of ``tokens``, special tokens included."""


def decoder(tokenizer: Tokenizer, *, special: bool) -> Callable[[np.ndarray], str]:
    """Return a function from tokens, int32 [T], to text. special: with special tokens but the EOS at the end.

    Raises ConfigError if the tokenizer cannot show them.
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
"""A message of a chat: role, content, and whatever else a chat template knows."""


@runtime_checkable
class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer with the model's chat template."""

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]], ask: bool, **options: Any
    ) -> str:
        """Return the text of a conversation. ask: up to the model's next message. options: of the template.

        Raises ConfigError if the model has no chat template, or if the template refuses the messages.
        """

    def encode_rendered(self, text: str) -> np.ndarray:
        """Return tokens, int32 [T], of rendered text; nothing is added at its start or end."""


class Task(ABC):
    """A set of prompts and the rewards of completions.

    It must have the first three methods. A class of a user's own need not derive from this one:
    ``task_contract.with_defaults`` adds what it lacks. score_name: name of the share of prompts answered
    correctly. evaluation_temperature: temperature at which evaluation prompts are answered; 0 is greedy.
    longest_call: deadline of a call of ``rewards`` or ``correct``, s; None: the run's. A task whose calls
    load models, or wait for what has deadlines of its own, says infinity.
    """

    score_name: str = PASS_AT_1
    evaluation_temperature: float = 0.0
    longest_call: float | None = None

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return all prompts of a split, in a fixed order: ``prompts(split)[i].id == i``."""

    @abstractmethod
    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
        """Return a number per completion of one prompt. Called in one thread, not the main one.

        A completion whose reward is not finite is set aside. If this method raises, all of them are.
        """

    @abstractmethod
    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[bool]:
        """Tell whether each completion counts for the score; called in the same thread as ``rewards``."""

    def reward_parts(self) -> Mapping[str, Sequence[float]]:
        """Return the terms of a reward that is a sum, for the metrics; called right after ``rewards``.

        They are, by name, a number per completion of that call.
        """
        return {}

    def grades(self) -> Sequence[float]:
        """Return rewards in evaluations, if answers are more or less good; called right after ``correct``.

        There is one per completion of that call; () means that answers are only right or wrong.
        """
        return ()

    def summary(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return figures by name, such as diversity, over all completions of ``groups``, for tba evaluate."""
        return {}

    def encode_question(self, text: str) -> np.ndarray | None:
        """Return tokens, int32 [T], of the prompt for a user's question to tba ask; None: the text alone."""
        return None

    def converse(self, generator: Generator, tokenizer: Tokenizer) -> Generator:
        """Wrap a generator of turns in one of conversations with an environment, if the task has one.

        ``tokenizer`` is for the caller's thread.
        """
        return generator

    def question(self, text: str) -> Prompt:
        """Return the start of a conversation about a user's question; only asked of tasks that converse."""
        raise NotImplementedError

    def show_special_tokens(self) -> None:
        """Show special tokens of completions from now on, by ``decoder``. Raises ConfigError if it cannot."""
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        raise ConfigError(
            f"task.special_tokens would be ignored by the task {name}: give it the method "
            "show_special_tokens() of ports.Task"
        )


class Victim(Protocol):
    """A fixed model, other than the policy, that a task queries, such as the one that red-teaming tests."""

    def answers(self, texts: Sequence[str]) -> list[list[str]]:
        """Return sampled answers to each text, equally many. Blocks; any thread may call it.

        Raises ConfigError if the model cannot be served, EngineError if it keeps dying.
        """


class Serve(Protocol):
    """Function that makes a Victim, given to tasks whose constructor has an argument ``serve``."""

    def __call__(
        self, model: ModelSection, generator: GeneratorSection, *, chat: bool, keys: Sequence[str]
    ) -> Victim:
        """Begin to serve ``model``. Raises ConfigError.

        generator: sampling, number of answers to a text (completions_per_prompt) and memory. chat: whether
        texts are a user's messages in the model's chat template. keys: config keys that errors name, that of
        the path first.
        """


class Generator(Protocol):
    """A policy that samples by continuous batching: submit requests, step, take finished groups.

    version: number of the weights in use. load_seconds: pause of generation for the last load. busy_seconds:
    time spent generating so far. rebuilds: number of dead engines replaced.

    It may also have these. nan_groups: number of groups sampled again so far because a log-probability was
    NaN. recompute_share: share of the tokens computed so far that a load of weights had made worthless.
    stage: what the engine is doing before it can sample; empty once it can.
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
        """True while the last ``load`` is under way."""

    @property
    def in_flight(self) -> int:
        """Number of completions that have not ended, and of finished groups yet to be returned."""

    def submit(self, request: Request) -> None:
        """Queue a request; its completions hold what its ``sampling`` asks for, ``top_logprobs`` included.

        Raises ValueError if prompt and completion exceed the context.
        """

    def step(self) -> list[Group]:
        """Generate for a moment; return the groups that are now complete."""

    def load(self, update: WeightUpdate) -> None:
        """Replace the weights in place; requests in flight continue under the new weights.

        The old weights stay in use while ``loading``.
        """

    def close(self) -> None:
        """Release the engine."""


class Reference(Protocol):
    """The reference policy π_ref. Called in one thread, not the main one.

    step: optimizer step of this policy; 0 is the initial one.
    """

    step: int

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return, per group and completion, each token's log-probability, float32 [T].

        They are taken at model.logprob_temperature. An environment's tokens may have any number.
        """

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return ``logprobs_of`` groups under other weights. ``weights.data`` is unchanged after it."""

    def load(self, step: int) -> None:
        """Become the policy of ``step``, which the trainer has exported."""


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
        """Return log π_ref of the completions' tokens, float32 [T], rows in order, if it is scored here.

        step: optimizer step of the reference: 0, or one that was exported.
        """

    def write_weights(self, out: np.ndarray) -> Callable[[], object] | None:
        """Copy the current weights into ``out``, uint8 [layout.nbytes], or begin to copy them: see ``Write``.

        Later steps do not change what is written.
        """

    def save(self, folder: Path) -> Callable[[], str]:
        """Copy weights and optimizer; return a function that writes them durably into an existing ``folder``.

        The function is called once, before the next ``save``, in any thread. It returns once all ranks have
        written; its result is lines of the inventory for files whose checksums are known by then. It raises
        StateError if they cannot be written, or DiskFullError for lack of room; then ``save`` may be called
        again.
        """

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote: exactly for the same number of ranks, otherwise up to rounding.

        Raises StateError if the folder is of another model or lacks something that is needed.
        """

    def export(self, folder: Path) -> None:
        """Write a folder that ``from_pretrained`` and ``vllm serve`` load; it appears whole, by rename.

        With LoRA the adapter is merged into the weights, and also lies in the subfolder ``adapter.FOLDER``.
        """

    def close(self) -> None:
        """Release the ranks that follow."""


class SharedLearner(Learner, Protocol):
    """A learner that is spread over all trainer ranks; each holds a part."""

    def follow(self, slot: Callable[[], np.ndarray] | None) -> None:
        """Obey the leader until it closes the learner.

        ``slot`` is called once per ``write_weights`` of the leader. It returns the buffer, uint8
        [layout.nbytes], that receives this rank's part of the weights. None: the leader writes all of them,
        as without Config.one_world.
        """


class Backend(Protocol):
    """The implementation behind ``model.path``: how a policy is trained and sampled.

    The usual one is in ``engine.hf_backend``. Your own is a class that is called with the run's Config
    and named as ``model.path=module:Class``; the module is looked up like reward functions.
    """

    def tokenizer(self) -> Tokenizer:
        """Make a new tokenizer; each is used in one thread."""

    def generator(self, *, seed: int) -> Generator:
        """Make a searcher's generator."""

    def reference(self, folder_of: Callable[[int], Path]) -> Reference:
        """Make a searcher's reference, at first the initial policy.

        folder_of: gives, by step, the folder of the exported policy that becomes the reference.
        """

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """Make a trainer rank's learner; ``store``: this attempt's private folder, shared by these ranks."""


Write = Callable[[np.ndarray], Callable[[], object] | None]
"""Function that writes weights into a buffer, uint8. If it returns a function, it has only begun to write.
The returned function, called in any thread, waits until all is written. It raises ExchangeError if another
rank is gone."""


class TrainerExchange(Protocol):
    """The leading trainer's end of the exchange. No call waits for a searcher, except ``close``."""

    def publish(self, publication: Publication, write: Write) -> bool:
        """Start a round: ``write`` fills a uint8 buffer with the weights of ``publication``; see ``Write``.

        Returns False, with nothing written, while a round is under way. Raises ExchangeError, naming who is
        missing, once a round has outlasted its deadline.
        """

    def gather(self) -> bool:
        """Start a round as ``publish`` does, but without weights, to fetch shards that the trainer awaits."""

    def collect(self) -> list[Shard]:
        """Return the shards that arrived since the last call, each exactly once, in order per searcher."""

    @property
    def stop_requested(self) -> bool:
        """True once a searcher has been asked (by a signal) to stop the run."""

    def close(self) -> None:
        """Finish the round under way, and tell every searcher that the run is over.

        Shards that were not collected stay on disk, and a resume merges them.
        """


class SearcherExchange(Protocol):
    """A searcher's end of the exchange. No call waits."""

    def offer(self, shard: Shard) -> None:
        """Hand over a shard that is already sealed on disk."""

    def poll(self) -> WeightUpdate | None:
        """Return the newest weights not seen before, if any."""

    def request_stop(self) -> None:
        """Ask the trainer to stop the run at its next safe point; do nothing if only this searcher leaves."""

    @property
    def pending(self) -> int:
        """Number of shards offered and not yet merged; back-pressure depends on it."""

    @property
    def closed(self) -> bool:
        """True once the trainer has ended the run and every published weight has been polled."""


class EngineError(RuntimeError):
    """Raised if the engine died again and again; the message says how often and why."""


class ExchangeError(RuntimeError):
    """Raised if a peer is missing; the message names who, for how long, and the likely cause."""
