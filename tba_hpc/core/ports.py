"""Interfaces that the trainer's and the searcher's loop use: task, engine, reference, learner, exchange.

Both implementations of the exchange, over MPI and over files, pass the same tests, ``tests/contracts``.
Imports no heavy library.
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
"""Default name of a task's score, the share of prompts that were answered correctly."""

MEAN_REWARD = "mean reward"
"""Name of the score if rewards are not just 0 and 1, or if no answer can be called correct."""

RIGHT_AND_ENDED = "right and ended"
"""Name of a second score, the share of answers that are correct and not truncated."""

IDLE_DEADLINES = 6
"""Longest pause between two rounds of the exchange, as a multiple of launch.timeout_seconds. If a pause is
longer, a searcher ends, because its trainer must be gone."""


class Tokenizer(Protocol):
    """Converter of text to tokens and back. Each tokenizer is used in one thread only."""

    eos_token_id: int
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of ``text``: with a BOS if the model uses one, without EOS."""

    def encode_chat(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of a chat that asks the model to answer a user's ``text``.

        Raises ConfigError if the model has no chat template.
        """

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of ``tokens``, without special tokens."""


@runtime_checkable
class WholeTokenizer(Tokenizer, Protocol):
    """A tokenizer that can also decode special tokens instead of dropping them; see task.special_tokens."""

    def decode_whole(self, tokens: np.ndarray) -> str:
        """Return the text of ``tokens``, special tokens included."""


def decoder(tokenizer: Tokenizer, *, special: bool) -> Callable[[np.ndarray], str]:
    """Return a function from tokens, int32 [T], to text.

    special: whether to show special tokens, except an EOS at the end. Raises ConfigError if the tokenizer
    cannot show them.
    """
    if not special:
        return tokenizer.decode
    if not isinstance(tokenizer, WholeTokenizer):
        raise ConfigError(
            "the tokenizer of model.path cannot show special tokens: give it the method decode_whole() of "
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

        tools: descriptions of the tools that the model may call, as JSON schemas. ask: whether to add the
        generation prompt. options: further variables of the chat template. Raises ConfigError if the model
        has no chat template, or if the template refuses the messages.
        """

    def encode_rendered(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T], of a text that ``render`` made, with no BOS or EOS added."""


class Task(ABC):
    """A set of prompts and the rewards of completions.

    The first three methods are required. A user's class need not derive from this one, because
    ``task_contract.with_defaults`` adds the other methods.

    score_name: name of the share of prompts answered correctly. If it is MEAN_REWARD, this share means
    nothing, and is not shown. evaluation_temperature: sampling temperature of evaluations; 0 is greedy.
    longest_call: seconds that a call of ``rewards`` or ``correct`` may take; None: half of
    launch.timeout_seconds. A task whose calls load models, or have their own limits, sets it to infinity.
    """

    score_name: str = PASS_AT_1
    evaluation_temperature: float = 0.0
    longest_call: float | None = None

    @abstractmethod
    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return all prompts of a split, the same in each call; ``prompts(split)[i].id`` is ``i``."""

    @abstractmethod
    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> Sequence[float]:
        """Return the reward of each completion of one prompt.

        All calls are made in one background thread; a new thread takes over if a call exceeds its time limit.
        A completion whose reward is not finite is left out of training. If this method raises an exception,
        all completions of the call are left out, but a ConfigError or EngineError ends the run.
        """

    @abstractmethod
    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Sequence[bool]:
        """Return whether each completion correctly answers the prompt at the same index.

        Called in the same thread as ``rewards``, during evaluations.
        """

    def reward_parts(self) -> Mapping[str, Sequence[float]]:
        """Return the parts from which rewards were computed, such as the terms of a sum, for the metrics.

        Called right after ``rewards``. The result maps each part's name to one number per completion of that
        call.
        """
        return {}

    def grades(self) -> Sequence[float]:
        """Return the rewards of an evaluation's answers, or () if answers are only right or wrong.

        Called right after ``correct``; there is one reward for each completion of that call. NaN means that
        the answer could not be judged: it counts as wrong, and a mean reward leaves it out.
        """
        return ()

    def summary(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return further statistics of an evaluation, such as diversity, by name.

        groups: all completions of the evaluation. Only ``tba evaluate`` calls this.
        """
        return {}

    def encode_question(self, text: str) -> np.ndarray | None:
        """Return the prompt's tokens, int32 [T], for a question that a user asks by ``tba ask``.

        None: the prompt is the text itself.
        """
        return None

    def converse(self, generator: Generator, tokenizer: Tokenizer) -> Generator:
        """Return a generator of whole conversations, which samples their turns from ``generator``.

        A task without an environment returns ``generator`` itself. tokenizer: a tokenizer for conversations,
        which only the thread that calls this method uses.
        """
        return generator

    def question(self, text: str) -> Prompt:
        """Return the prompt of a conversation that begins with a user's question. ``tba ask`` calls this.

        Only a task that overrides ``converse`` needs this method. Raises ConfigError if no conversation can
        begin with the question. text: the question, or a JSON object with the fields of a row of the task's
        data.
        """
        raise NotImplementedError

    def show_special_tokens(self) -> None:
        """Show special tokens in decoded completions from now on, as ``task.special_tokens`` asks.

        Raises ConfigError if the task cannot, as this default does.
        """
        name = f"{type(self).__module__}:{type(self).__qualname__}"
        raise ConfigError(
            f"task.special_tokens would be ignored by the task {name}: give it the method "
            "show_special_tokens() of ports.Task"
        )


class Victim(Protocol):
    """A fixed model, other than the policy, that a task queries, such as the target of red-teaming."""

    def answers(self, texts: Sequence[str]) -> list[list[str]]:
        """Return sampled answers to each text, equally many to each. Blocks until all are sampled.

        Any thread may call this method. Raises ConfigError if the model cannot be served, or EngineError if
        the engine keeps dying.
        """


class Serve(Protocol):
    """Function that makes a Victim. Every task whose constructor has an argument ``serve`` gets it."""

    def __call__(
        self, model: ModelSection, generator: GeneratorSection, *, chat: bool, keys: Sequence[str]
    ) -> Victim:
        """Begin to serve ``model``, and return it as a Victim, from which the task requests answers.

        Raises ConfigError if the model cannot be served.

        generator: sampling parameters, limits on memory, and the number of answers to each text
        (completions_per_prompt). chat: whether the chat template turns each text into a user's message. keys:
        config keys that error messages name; the first is the key of the model's path.
        """


class Generator(Protocol):
    """A policy that samples by continuous batching: submit requests, call ``step``, get finished groups.

    version: version of the weights in use. load_seconds: seconds for which the last load interrupted
    sampling. busy_seconds: seconds spent sampling so far. rebuilds: number of dead engines that were
    replaced.

    Three attributes are optional. nan_groups: number of groups sampled again because a log-probability was
    NaN. recompute_share: share of all computed tokens that were computed again, because a load of weights
    discarded their keys and values. stage: what the engine is doing while it starts; empty once it can
    sample.
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
        """Number of completions that ``step`` has yet to return, finished ones included."""

    def submit(self, request: Request) -> None:
        """Queue a request. Its completions must have ``top_logprobs`` if ``request.sampling`` asks for them.

        Raises ValueError if the prompt and the longest completion exceed the context length.
        """

    def step(self) -> list[Group]:
        """Sample for a fraction of a second; return the groups whose completions have all finished."""

    def load(self, update: WeightUpdate) -> None:
        """Begin to replace the weights. Unfinished completions continue with the new weights.

        The old weights stay in use while ``loading``.
        """

    def close(self) -> None:
        """Release the engine."""


class Reference(Protocol):
    """The reference policy π_ref. Always called in the same background thread.

    step: optimizer step that made this policy; 0: the initial policy.
    """

    step: int

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return the log-probabilities of each completion's tokens, float32 [T], by group and completion.

        They are at the temperature model.logprob_temperature. Values at an environment's tokens are ignored.
        """

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return ``logprobs_of`` the groups under the given weights instead of the reference's own.

        ``weights.data`` stays unchanged.
        """

    def load(self, step: int) -> None:
        """Load the policy that the trainer exported at ``step``."""


class Learner(Protocol):
    """The policy under training, as the trainer's loop sees it.

    Only the leading trainer rank calls these methods; the other ranks ``follow``. layout: names, dtypes and
    byte ranges of the weights in a buffer. Every method raises ExchangeError if another trainer rank is gone.
    """

    layout: WeightLayout

    def step(self, batch: TrajectoryBatch, *, learning_rate: float, beta: float) -> Mapping[str, float]:
        """Take one optimizer step on the mean loss over all rows of ``batch``; return its metrics.

        The metrics are: loss and the objective's own metrics, as means over the batch; ``objectives.figures``
        of the batch; grad_norm, before clipping; tokens, the number of sampled tokens; learning_rate;
        skipped_steps, the number so far. If the loss or the gradient's norm is not finite, the step is
        skipped: weights and optimizer state stay as they are, and the grad_norm returned is not finite.
        Raises ConfigError if too many steps in a row are skipped.
        """

    def reference_logprobs(self, batch: TrajectoryBatch, step: int) -> np.ndarray:
        """Return log π_ref of all completion tokens, float32 [T].

        Only called if the trainer computes these log-probabilities, not the searchers. step: optimizer step
        that made the reference: 0, or a step whose policy was exported.
        """

    def write_weights(self, out: np.ndarray) -> Callable[[], object] | None:
        """Copy the current weights into ``out``, uint8 [layout.nbytes], or begin to; see ``Write``.

        Steps that follow do not change what is written.
        """

    def save(self, folder: Path) -> Callable[[], str]:
        """Copy weights and optimizer state; return a function that writes the copy to an existing ``folder``.

        Call the function once, in any thread, before the next ``save``. It returns once the files of all
        ranks are safely on disk. The result holds the lines of the checkpoint's list of files
        (``run.inventory``) for those files whose checksums are known by then. It raises StateError if writing
        fails, or DiskFullError if the disk is full; ``save`` may then be called again.
        """

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote to ``folder``.

        With the same number of ranks the result is exact, otherwise exact up to rounding. Raises StateError
        if the folder belongs to another model or is incomplete.
        """

    def export(self, folder: Path) -> None:
        """Write the policy as a folder that ``from_pretrained`` and ``vllm serve`` can load.

        The folder appears by an atomic rename. With LoRA the adapter is merged into the weights, and is also
        saved by itself in the subfolder ``learner.adapter.FOLDER``.
        """

    def close(self) -> None:
        """End ``follow`` on the other trainer ranks."""


class SharedLearner(Learner, Protocol):
    """A learner that is spread over all trainer ranks. Every rank holds one; the leading rank calls it."""

    def follow(self, next_weights: Callable[[], np.ndarray] | None) -> None:
        """Carry out the leading rank's calls until it closes the learner. Other ranks call this.

        next_weights: function that is called once for each ``write_weights`` of the leading rank. It returns
        the buffer, uint8 [layout.nbytes], into which this rank writes its part of the weights. None: the
        leading rank writes all weights, as it does if trainers and searchers are not in one MPI world.
        """


class Backend(Protocol):
    """Implementation of a policy's training and sampling, chosen by ``model.path``.

    The default is in ``engine.hf_backend``. ``model.path=module:Class`` names your own class, which is
    constructed from the run's Config; the module is found in the same way as reward functions are.
    """

    def tokenizer(self) -> Tokenizer:
        """Make a new tokenizer. Each is used in one thread only."""

    def generator(self, *, seed: int) -> Generator:
        """Make a searcher's generator."""

    def reference(self, folder_of: Callable[[int], Path]) -> Reference:
        """Make a searcher's reference, which is the initial policy until ``load`` is called.

        folder_of: function from an optimizer step to the folder of the policy that was exported then.
        """

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """Make a trainer rank's learner.

        rank, ranks: its index among the trainer ranks, and their number. store: folder of this attempt, in
        which the trainer ranks find each other through files. folder_of: as for ``reference``.
        """


Write = Callable[[np.ndarray], Callable[[], object] | None]
"""Function that writes weights into a buffer, uint8 [layout.nbytes].

It returns None once all is written, or earlier with a function that waits for the rest. Any thread may call
the returned function; it raises ExchangeError if another rank is gone."""


class TrainerExchange(Protocol):
    """The leading trainer's end of the exchange. Only ``close`` waits for searchers."""

    def publish(self, publication: Publication, write: Write) -> bool:
        """Start a round of the exchange, which sends weights to the searchers and fetches their shards.

        write: function that fills a buffer with the weights of ``publication``. Returns True if the round has
        started, or False, with nothing written, while an earlier round is in progress. Raises ExchangeError,
        which names the missing ranks, if the earlier round has exceeded its deadline.
        """

    def gather(self) -> bool:
        """Start a round that only fetches shards, because the trainer waits for them.

        Returns and raises the same as ``publish``.
        """

    def collect(self) -> list[Shard]:
        """Return the shards that have arrived since the last call.

        Each shard is returned exactly once, and those of one searcher in order.
        """

    @property
    def stop_requested(self) -> bool:
        """True once a signal has asked a searcher to stop the run."""

    def close(self) -> None:
        """Finish the present round, and tell every searcher that this attempt is over.

        An attempt is one start of the run's ranks. Shards that were not collected stay on disk, and the next
        attempt merges them.
        """


class SearcherExchange(Protocol):
    """A searcher's end of the exchange. No call waits."""

    def offer(self, shard: Shard) -> None:
        """Offer a shard, already sealed on disk, to the trainer."""

    def poll(self) -> WeightUpdate | None:
        """Return weights that were not returned before; None if there are none.

        These are the oldest weights that must still be evaluated, or else the newest weights.
        """

    def request_stop(self) -> None:
        """Ask the trainer to stop the run after its present step.

        An elastic searcher does not call this, because it can leave while the run goes on.
        """

    @property
    def pending(self) -> int:
        """Number of offered shards that are not yet merged; it limits how far a searcher runs ahead."""

    @property
    def ended(self) -> bool:
        """True once the trainer has ended the run, even if ``poll`` has yet to return the last weights."""

    @property
    def closed(self) -> bool:
        """True once the trainer has ended the run and ``poll`` has returned the last weights."""


class EngineError(RuntimeError):
    """Raised if the engine cannot go on, for example because it keeps dying; the message says why."""


class ExchangeError(RuntimeError):
    """Raised if a rank is gone or does not deliver in time.

    The message names the rank, how long it was waited for, and the likely cause.
    """
