"""A model so small that all completions can be enumerated, and its optimum is known exactly.

The policy is a table of logits by prompt and by prefix of the completion, so that the target distribution
π_ref·exp(r/β)/Z can be computed and reached. Task, generator and reference are here, the learner is in
``tabular_learner``. They implement the interfaces of ``core.ports`` as any backend does, and share only the
``Table``. ``Tabular`` is the whole as the model of a run, whose ranks start at once: ``tba run
tools/tabular.yaml``.

Shape letters: P prompts, C possible completions, S prefixes that can be continued, V tokens that can follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import safetensors.numpy

from tba_hpc.config import Config
from tba_hpc.core.ports import SharedLearner, Task
from tba_hpc.core.types import TOP_LOGPROBS, Completion, Group, Prompt, Request, Split, WeightUpdate

EXPORT_FILE = "model.safetensors"
"""Name of the file with the logits that a learner exports."""


@dataclass(frozen=True)
class Table:
    """Prompts of one token, all completions of up to ``length`` letters, their rewards, and the reference.

    There are ``letters`` different letters. A completion ends with the end-of-sequence token or, cut off,
    with its ``length``-th letter. Tokens are 0 to letters − 1 (the letters), ``letters`` (end of sequence),
    then one per prompt. Rewards in [0, 1) and the reference's logits are drawn with ``seed``. A policy is
    softmax(logits/``temperature``).
    """

    prompts: int = 4
    letters: int = 2
    length: int = 3
    seed: int = 0
    temperature: float = 1.0

    @property
    def eos(self) -> int:
        """The end-of-sequence token."""
        return self.letters

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of a policy's logits: P, S, V."""
        return self.prompts, sum(self.letters**t for t in range(self.length)), self.letters + 1

    @cached_property
    def completions(self) -> tuple[np.ndarray, ...]:
        """All C completions, int32 [T] each: those that end by themselves, shortest first; then the rest."""
        ended = [
            (*word, self.eos) for t in range(self.length) for word in product(range(self.letters), repeat=t)
        ]
        cut = product(range(self.letters), repeat=self.length)
        return tuple(np.array(tokens, np.int32) for tokens in [*ended, *cut])

    @cached_property
    def reward_PC(self) -> np.ndarray:
        """Reward of each completion, float32."""
        rng = np.random.default_rng([self.seed, 0])
        return rng.random((self.prompts, len(self.completions)), np.float32)

    @cached_property
    def ref_logits_PSV(self) -> np.ndarray:
        """Logits of the reference, with which every policy starts, float32."""
        return np.random.default_rng([self.seed, 1]).standard_normal(self.shape, np.float32)

    def prompt_token(self, prompt: int) -> int:
        """Return the single token of a prompt."""
        return self.letters + 1 + prompt

    def prefixes(self, tokens_NL: np.ndarray) -> np.ndarray:
        """Return the number of the prefix that each token of N completions follows, int64 [N, L], 0 to S − 1.

        Prefixes are numbered like the nodes of a heap with ``letters`` children each. Numbers after the end
        of a completion are meaningless.
        """
        prefix_NL = np.zeros(tokens_NL.shape, np.int64)
        for t in range(1, tokens_NL.shape[1]):
            prefix_NL[:, t] = prefix_NL[:, t - 1] * self.letters + tokens_NL[:, t - 1] + 1
        return prefix_NL

    def index(self, completion: np.ndarray) -> int:
        """Return the index of a completion in ``completions``."""
        return self._index[np.asarray(completion, np.int32).tobytes()]

    @cached_property
    def _index(self) -> dict[bytes, int]:
        return {tokens.tobytes(): i for i, tokens in enumerate(self.completions)}

    def next_logprobs(self, logits: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of the tokens that can follow, over the last axis, float64."""
        return log_softmax(logits / self.temperature)

    def token_logprobs(self, logits_PSV: np.ndarray, prompt: int, completion: np.ndarray) -> np.ndarray:
        """Return the log-probability of each token of a completion, float64 [T]."""
        logprob_TV = self.next_logprobs(logits_PSV[prompt, self.prefixes(completion[None])[0]])
        return logprob_TV[np.arange(len(completion)), completion]

    def probabilities(self, logits_PSV: np.ndarray) -> np.ndarray:
        """Return the probability of every completion under a policy, float64 [P, C]."""
        prefix_CL, token_CL, mask_CL = self._cells
        return np.exp((self.next_logprobs(logits_PSV)[:, prefix_CL, token_CL] * mask_CL).sum(2))

    @cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Prefix and token at each position of every completion, and a mask of the positions that exist.

        Each array is [C, length].
        """
        length_C = np.array([len(tokens) for tokens in self.completions])
        mask_CL = np.arange(self.length) < length_C[:, None]
        token_CL = np.zeros(mask_CL.shape, np.int32)
        token_CL[mask_CL] = np.concatenate(self.completions)
        return np.where(mask_CL, self.prefixes(token_CL), 0), token_CL, mask_CL

    def optimum(self, beta: float, power: float = 1.0) -> np.ndarray:
        """Return π_ref^power·exp(r/β)/Z, the only minimum of the objective, float64 [P, C]."""
        ref_PC = self.probabilities(self.ref_logits_PSV)
        weight_PC = ref_PC**power * np.exp(self.reward_PC.astype(np.float64) / beta)
        return weight_PC / weight_PC.sum(1, keepdims=True)


def total_variation(p_PC: np.ndarray, q_PC: np.ndarray) -> np.ndarray:
    """Return half of the summed absolute differences of two distributions, float64 [P], from 0 to 1."""
    return np.abs(p_PC - q_PC).sum(1) / 2


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return log softmax(logits) over the last axis, float64."""
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


class TabularTokenizer:
    """Tokenizer with letters a, b, … and prompts A, B, …; the end of a sequence has no text."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.eos_token_id = table.eos
        self.vocab_size = table.eos + 1 + table.prompts
        lower = [chr(ord("a") + i) for i in range(table.letters)]
        upper = [chr(ord("A") + i) for i in range(table.prompts)]
        self._texts = [*lower, "", *upper]

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens, int32 [T]. Raises ValueError if the table lacks a character."""
        return np.array([self._texts.index(character) for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Return letters and prompts as text."""
        return "".join(self._texts[token] for token in tokens)


class TabularTask(Task):
    """Task with the table's rewards, and its prompts, the same in every split."""

    def __init__(self, table: Table) -> None:
        self._table = table
        decode = TabularTokenizer(table).decode
        best_P = table.reward_PC.argmax(1)
        self._prompts = tuple(
            Prompt(i, np.array([table.prompt_token(i)], np.int32), decode(table.completions[best]))
            for i, best in enumerate(best_P)
        )

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return all prompts. ``target`` is the text of the best completion."""
        return self._prompts

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Return the table's rewards."""
        columns = [self._table.index(completion.tokens) for completion in completions]
        return [float(reward) for reward in self._table.reward_PC[prompt.id, columns]]

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Return for each completion whether no other one has a higher reward."""
        best_P = self._table.reward_PC.max(1)
        return [
            self.rewards(prompt, [completion]) == [best_P[prompt.id]]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


class World(TabularTask):
    """Task of a run whose model is a ``Tabular``."""

    def __init__(
        self, tokenizer: TabularTokenizer, *, train_file: str | None = None, test_file: str | None = None
    ) -> None:
        super().__init__(tokenizer.table)


class TabularReference:
    """Reference of a run: the table's, until ``load`` takes a policy that a learner has exported.

    folder_of: function from a step to the folder of the policy exported then; None: there is none.
    """

    def __init__(self, table: Table, folder_of: Callable[[int], Path] | None = None) -> None:
        self.step = 0
        self._table = table
        self._folder_of = folder_of
        self.logits_PSV = table.ref_logits_PSV

    def load(self, step: int) -> None:
        """Load the policy that the learner exported at ``step``."""
        assert self._folder_of is not None, "a frozen reference is never reset"
        exported = safetensors.numpy.load((self._folder_of(step) / EXPORT_FILE).read_bytes())
        self.step, self.logits_PSV = step, exported["logits"]

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Return the log-probabilities of each completion's tokens, float32 [T]."""
        return self._logprobs(self.logits_PSV, group)

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return ``logprobs`` of every group."""
        return [self.logprobs(group) for group in groups]

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Return ``logprobs_of`` groups under other weights."""
        logits_PSV = weights.data.view(np.float32).reshape(self._table.shape)
        return [self._logprobs(logits_PSV, group) for group in groups]

    def of_tokens(self, prompt: int, completion: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of the tokens of one completion, float32 [T]."""
        return self._table.token_logprobs(self.logits_PSV, prompt, completion).astype(np.float32)

    def _logprobs(self, logits_PSV: np.ndarray, group: Group) -> list[np.ndarray]:
        table, prompt = self._table, group.request.prompt.id
        return [
            table.token_logprobs(logits_PSV, prompt, completion.tokens).astype(np.float32)
            for completion in group.completions
        ]


class TabularGenerator:
    """Generator that samples from a table of logits: the reference's, version 0, until others are loaded."""

    def __init__(self, table: Table, *, seed: int = 0) -> None:
        self.version = 0
        self.loading = False
        self.load_seconds = self.busy_seconds = 0.0
        self.rebuilds = 0
        self._table = table
        self._logits_PSV = table.ref_logits_PSV
        self._rng = np.random.default_rng(seed)
        self._decoding: list[_Decoding] = []

    @property
    def in_flight(self) -> int:
        """Number of unfinished completions."""
        return sum(decoding.open for decoding in self._decoding)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises ValueError if its sampling parameters do not fit the table."""
        sampling, length = request.sampling, self._table.length
        if sampling.max_tokens != length or sampling.top_p != 1:
            raise ValueError(
                f"max_tokens={sampling.max_tokens} and top_p={sampling.top_p} do not fit a table of "
                f"completions of up to {length} tokens: use max_tokens={length} and top_p=1"
            )
        self._decoding.append(_Decoding(self._table, request))

    def step(self) -> list[Group]:
        """Sample one token for every request; return the groups that are now complete."""
        for decoding in self._decoding:
            decoding.advance(self._logits_PSV, self._rng, self.version)
        whole = [decoding.group() for decoding in self._decoding if decoding.whole]
        self._decoding = [decoding for decoding in self._decoding if not decoding.whole]
        return whole

    def load(self, update: WeightUpdate) -> None:
        """Replace the logits. Unfinished requests continue with the new ones."""
        self._logits_PSV = update.data.view(np.float32).reshape(self._table.shape).copy()
        self.version = update.publication.version

    def close(self) -> None:
        """Drop unfinished requests."""
        self._decoding.clear()


class _Decoding:
    """An unfinished request of N completions; each ``advance`` adds a token to those that have not ended."""

    def __init__(self, table: Table, request: Request) -> None:
        self._table = table
        self.request = request
        self._tokens_NL = np.zeros((request.n, table.length), np.int32)
        self._logprob_NL = np.zeros((request.n, table.length), np.float32)
        self._top_NLC = np.zeros((*self._tokens_NL.shape, request.sampling.top_logprobs), TOP_LOGPROBS)
        self._versions = np.zeros((request.n, 2), np.int32)
        self._length_N = np.zeros(request.n, np.int64)
        self._open_N = np.ones(request.n, bool)
        self._steps = 0

    @property
    def open(self) -> int:
        """Number of completions that have not ended."""
        return int(self._open_N.sum())

    @property
    def whole(self) -> bool:
        """True if every completion has ended."""
        return self.open == 0

    def advance(self, logits_PSV: np.ndarray, rng: np.random.Generator, version: int) -> None:
        """Sample one token for every completion that has not ended."""
        t, rows = self._steps, np.flatnonzero(self._open_N)
        prefix_N = self._table.prefixes(self._tokens_NL[rows, : t + 1])[:, -1]
        logprob_NV = self._table.next_logprobs(logits_PSV[self.request.prompt.id, prefix_N])
        token_N = _draw(rng, logprob_NV, self.request.sampling.temperature / self._table.temperature)
        self._tokens_NL[rows, t] = token_N
        self._logprob_NL[rows, t] = logprob_NV[np.arange(len(rows)), token_N]
        self._top_NLC[rows, t] = top_logprobs(logprob_NV, self._top_NLC.shape[2])
        self._versions[rows, min(t, 1) :] = version
        self._length_N[rows] = t + 1
        self._open_N[rows] = (token_N != self._table.eos) & (t + 1 < self._table.length)
        self._steps += 1

    def group(self) -> Group:
        """Return the completions as a group."""
        rows = zip(self._tokens_NL, self._logprob_NL, self._length_N, self._top_NLC, strict=True)
        completions = [
            Completion(
                tokens[:length],
                logprobs[:length],
                "stop" if tokens[length - 1] == self._table.eos else "length",
                top_logprobs=top_LC[:length],
            )
            for tokens, logprobs, length, top_LC in rows
        ]
        return Group(self.request, tuple(completions), self._versions)


def top_logprobs(logprob_XV: np.ndarray, k: int) -> np.ndarray:
    """Return the k likeliest tokens over the last axis, likeliest first, TOP_LOGPROBS [..., k]."""
    token_XC = np.argsort(-logprob_XV, axis=-1)[..., :k]
    found = np.empty(token_XC.shape, TOP_LOGPROBS)
    found["token"], found["logprob"] = token_XC, np.take_along_axis(logprob_XV, token_XC, -1)
    return found


def _draw(rng: np.random.Generator, logprob_NV: np.ndarray, temperature: float) -> np.ndarray:
    """Sample a token per row, int64 [N]; at temperature 0 it is the likeliest."""
    if temperature == 0:
        return logprob_NV.argmax(1)
    return (logprob_NV / temperature + rng.gumbel(size=logprob_NV.shape)).argmax(1)


class Tabular:
    """Backend (``core.ports.Backend``) on the default table."""

    step_seconds = 0.0
    """Shortest duration of an optimizer step, s."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._table = Table()

    def tokenizer(self) -> TabularTokenizer:
        """Make a tokenizer."""
        return TabularTokenizer(self._table)

    def generator(self, *, seed: int) -> TabularGenerator:
        """Make a generator, which begins with the reference's logits."""
        return TabularGenerator(self._table, seed=seed)

    def reference(self, folder_of: Callable[[int], Path]) -> TabularReference:
        """Make a reference, which begins as the table's."""
        return TabularReference(self._table, folder_of)

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """Make a learner. The leader alone computes; the other ranks only receive weights."""
        from lab.tabular_learner import TabularGroup  # torch takes longer to import than all the rest

        return TabularGroup(
            self._table,
            self._config.train,
            folder_of,
            rank=rank,
            ranks=ranks,
            store=store,
            step_seconds=self.step_seconds,
        )


class Unhurried(Tabular):
    """Backend with slower steps, so that something can happen during a run; searchers keep no core busy."""

    step_seconds = 0.1

    def generator(self, *, seed: int) -> TabularGenerator:
        """Make a generator whose steps take time."""
        return UnhurriedGenerator(self._table, seed=seed)


class Slow(Unhurried):
    """Backend with steps about as long as those of the quickstart."""

    step_seconds = 0.5


class UnhurriedGenerator(TabularGenerator):
    """Generator that pauses before each token, longest in an evaluation on the test split."""

    def step(self) -> list[Group]:
        """Sample one token for every request; return the groups that are now complete."""
        tested = any(decoding.request.split == "test" for decoding in self._decoding)
        time.sleep(1.0 if tested else 0.05)
        return super().step()
