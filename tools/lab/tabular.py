"""A world small enough to enumerate: a policy whose optimum is known exactly.

The policy is a table of logits per (prompt, prefix of the completion), so that the target distribution
π_ref·exp(r/β)/Z can be written down and reached. Task, generator and reference are here, the learner in
``tabular_learner``; they implement the ports as any backend does, and share nothing but the ``Table``.
``Tabular`` is all of it as the model of a run, whose ranks start in no time: ``tba run tools/tabular.yaml``.

Shape letters: P prompts, C completions that exist, S prefixes that can go on, V tokens that can follow.
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
"""What a learner exports: its logits."""


@dataclass(frozen=True)
class Table:
    """The world: one-token prompts, and completions of up to ``length`` of ``letters`` letters.

    A completion ends by the end-of-sequence token or, cut off, with its ``length``-th letter. Tokens
    are 0 … letters − 1 (the letters), ``letters`` (end of sequence), then one per prompt. ``seed`` draws
    rewards in [0, 1) and the reference's logits. A policy is softmax(logits/``temperature``).
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
        """Of a policy's logits: P, S, V."""
        return self.prompts, sum(self.letters**t for t in range(self.length)), self.letters + 1

    @cached_property
    def completions(self) -> tuple[np.ndarray, ...]:
        """All C completions, int32 [T] each, shortest first."""
        ended = [
            (*word, self.eos) for t in range(self.length) for word in product(range(self.letters), repeat=t)
        ]
        cut = product(range(self.letters), repeat=self.length)
        return tuple(np.array(tokens, np.int32) for tokens in [*ended, *cut])

    @cached_property
    def reward_PC(self) -> np.ndarray:
        """float32."""
        rng = np.random.default_rng([self.seed, 0])
        return rng.random((self.prompts, len(self.completions)), np.float32)

    @cached_property
    def ref_logits_PSV(self) -> np.ndarray:
        """float32: the reference, and every policy's start."""
        return np.random.default_rng([self.seed, 1]).standard_normal(self.shape, np.float32)

    def prompt_token(self, prompt: int) -> int:
        """The token that a prompt consists of."""
        return self.letters + 1 + prompt

    def prefixes(self, tokens_NL: np.ndarray) -> np.ndarray:
        """int64 [N, L]: the prefix, 0 … S − 1, that each token of a completion follows.

        Prefixes are numbered as the nodes of a heap with ``letters`` children each. After the end of a
        completion the numbers mean nothing.
        """
        prefix_NL = np.zeros(tokens_NL.shape, np.int64)
        for t in range(1, tokens_NL.shape[1]):
            prefix_NL[:, t] = prefix_NL[:, t - 1] * self.letters + tokens_NL[:, t - 1] + 1
        return prefix_NL

    def index(self, completion: np.ndarray) -> int:
        """Which completion this is."""
        return self._index[np.asarray(completion, np.int32).tobytes()]

    @cached_property
    def _index(self) -> dict[bytes, int]:
        return {tokens.tobytes(): i for i, tokens in enumerate(self.completions)}

    def next_logprobs(self, logits: np.ndarray) -> np.ndarray:
        """float64: log-probability of each token that can follow, over the last axis."""
        return log_softmax(logits / self.temperature)

    def token_logprobs(self, logits_PSV: np.ndarray, prompt: int, completion: np.ndarray) -> np.ndarray:
        """float64 [T]: log-probability of each token of a completion."""
        logprob_TV = self.next_logprobs(logits_PSV[prompt, self.prefixes(completion[None])[0]])
        return logprob_TV[np.arange(len(completion)), completion]

    def probabilities(self, logits_PSV: np.ndarray) -> np.ndarray:
        """float64 [P, C]: probability of every completion under a policy."""
        prefix_CL, token_CL, mask_CL = self._cells
        return np.exp((self.next_logprobs(logits_PSV)[:, prefix_CL, token_CL] * mask_CL).sum(2))

    @cached_property
    def _cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[C, length] each: prefix and token of every place of every completion, and whether there is one."""
        length_C = np.array([len(tokens) for tokens in self.completions])
        mask_CL = np.arange(self.length) < length_C[:, None]
        token_CL = np.zeros(mask_CL.shape, np.int32)
        token_CL[mask_CL] = np.concatenate(self.completions)
        return np.where(mask_CL, self.prefixes(token_CL), 0), token_CL, mask_CL

    def optimum(self, beta: float, power: float = 1.0) -> np.ndarray:
        """float64 [P, C]: π_ref^power·exp(r/β)/Z, the policy that the objective has for its only minimum."""
        ref_PC = self.probabilities(self.ref_logits_PSV)
        weight_PC = ref_PC**power * np.exp(self.reward_PC.astype(np.float64) / beta)
        return weight_PC / weight_PC.sum(1, keepdims=True)


def total_variation(p_PC: np.ndarray, q_PC: np.ndarray) -> np.ndarray:
    """float64 [P]: half the absolute difference of two distributions over completions, 0 … 1."""
    return np.abs(p_PC - q_PC).sum(1) / 2


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """float64, over the last axis."""
    logits = logits.astype(np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


class TabularTokenizer:
    """Letters are a, b, …; prompts A, B, …; the end of a sequence has no text."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.eos_token_id = table.eos
        self.vocab_size = table.eos + 1 + table.prompts
        lower = [chr(ord("a") + i) for i in range(table.letters)]
        upper = [chr(ord("A") + i) for i in range(table.prompts)]
        self._texts = [*lower, "", *upper]

    def encode(self, text: str) -> np.ndarray:
        """int32 [T]. ValueError if a character is none of the table's."""
        return np.array([self._texts.index(character) for character in text], np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Letters and prompts as text."""
        return "".join(self._texts[token] for token in tokens)


class TabularTask(Task):
    """The table's prompts, the same in every split, and its rewards."""

    def __init__(self, table: Table) -> None:
        self._table = table
        decode = TabularTokenizer(table).decode
        best_P = table.reward_PC.argmax(1)
        self._prompts = tuple(
            Prompt(i, np.array([table.prompt_token(i)], np.int32), decode(table.completions[best]))
            for i, best in enumerate(best_P)
        )

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """All prompts; ``target`` is the text of the best completion."""
        return self._prompts

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """The table's."""
        columns = [self._table.index(completion.tokens) for completion in completions]
        return [float(reward) for reward in self._table.reward_PC[prompt.id, columns]]

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """Whether no completion has a higher reward."""
        best_P = self._table.reward_PC.max(1)
        return [
            self.rewards(prompt, [completion]) == [best_P[prompt.id]]
            for prompt, completion in zip(prompts, completions, strict=True)
        ]


class World(TabularTask):
    """The task of a run whose model is a ``Tabular``: that of its table."""

    def __init__(
        self, tokenizer: TabularTokenizer, *, train_file: str | None = None, test_file: str | None = None
    ) -> None:
        super().__init__(tokenizer.table)


class TabularReference:
    """The table's reference policy, what a learner has exported to ``folder_of`` a step, or other logits."""

    def __init__(self, table: Table, folder_of: Callable[[int], Path] | None = None) -> None:
        self.step = 0
        self._table = table
        self._folder_of = folder_of
        self.logits_PSV = table.ref_logits_PSV

    def load(self, step: int) -> None:
        """Become the policy of ``step``."""
        assert self._folder_of is not None, "a frozen reference is never reset"
        exported = safetensors.numpy.load((self._folder_of(step) / EXPORT_FILE).read_bytes())
        self.step, self.logits_PSV = step, exported["logits"]

    def logprobs(self, group: Group) -> list[np.ndarray]:
        """Per completion, float32 [T]."""
        return self._logprobs(self.logits_PSV, group)

    def logprobs_of(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Give ``logprobs`` of every group."""
        return [self.logprobs(group) for group in groups]

    def logprobs_under(self, weights: WeightUpdate, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """Per group and completion, float32 [T], under other logits."""
        logits_PSV = weights.data.view(np.float32).reshape(self._table.shape)
        return [self._logprobs(logits_PSV, group) for group in groups]

    def of_tokens(self, prompt: int, completion: np.ndarray) -> np.ndarray:
        """float32 [T], of one completion."""
        return self._table.token_logprobs(self.logits_PSV, prompt, completion).astype(np.float32)

    def _logprobs(self, logits_PSV: np.ndarray, group: Group) -> list[np.ndarray]:
        table, prompt = self._table, group.request.prompt.id
        return [
            table.token_logprobs(logits_PSV, prompt, completion.tokens).astype(np.float32)
            for completion in group.completions
        ]


class TabularGenerator:
    """Samples from a table of logits: the reference's (version 0) until others are loaded."""

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
        """Completions submitted and not yet ended."""
        return sum(decoding.open for decoding in self._decoding)

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if it asks for other completions than the table has."""
        sampling, length = request.sampling, self._table.length
        if sampling.max_tokens != length or sampling.top_p != 1:
            raise ValueError(
                f"max_tokens={sampling.max_tokens} and top_p={sampling.top_p} do not fit a table of "
                f"completions of up to {length} tokens: use max_tokens={length} and top_p=1"
            )
        self._decoding.append(_Decoding(self._table, request))

    def step(self) -> list[Group]:
        """Advance every request by one token; return the groups that are now whole."""
        for decoding in self._decoding:
            decoding.advance(self._logits_PSV, self._rng, self.version)
        whole = [decoding.group() for decoding in self._decoding if decoding.whole]
        self._decoding = [decoding for decoding in self._decoding if not decoding.whole]
        return whole

    def load(self, update: WeightUpdate) -> None:
        """Copy other logits. Requests in flight go on under them."""
        self._logits_PSV = update.data.view(np.float32).reshape(self._table.shape).copy()
        self.version = update.publication.version

    def close(self) -> None:
        """Drop what is in flight."""
        self._decoding.clear()


class _Decoding:
    """A request in flight: N completions, of which the open ones get one more token at a time."""

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
        """Completions that have not ended."""
        return int(self._open_N.sum())

    @property
    def whole(self) -> bool:
        """Whether every completion has ended."""
        return self.open == 0

    def advance(self, logits_PSV: np.ndarray, rng: np.random.Generator, version: int) -> None:
        """Sample one token for every open completion."""
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
        """The completions as they are."""
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
    """The k likeliest tokens of the last axis, the likeliest first: TOP_LOGPROBS [..., k]."""
    token_XC = np.argsort(-logprob_XV, axis=-1)[..., :k]
    found = np.empty(token_XC.shape, TOP_LOGPROBS)
    found["token"], found["logprob"] = token_XC, np.take_along_axis(logprob_XV, token_XC, -1)
    return found


def _draw(rng: np.random.Generator, logprob_NV: np.ndarray, temperature: float) -> np.ndarray:
    """int64 [N]: a token per row; the likeliest at temperature 0."""
    if temperature == 0:
        return logprob_NV.argmax(1)
    return (logprob_NV / temperature + rng.gumbel(size=logprob_NV.shape)).argmax(1)


class Tabular:
    """A backend on the default table."""

    step_seconds = 0.0
    """What an optimizer step takes at least."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._table = Table()

    def tokenizer(self) -> TabularTokenizer:
        """Of the table."""
        return TabularTokenizer(self._table)

    def generator(self, *, seed: int) -> TabularGenerator:
        """Begins as the table's reference."""
        return TabularGenerator(self._table, seed=seed)

    def reference(self, folder_of: Callable[[int], Path]) -> TabularReference:
        """The table's, or what the learner has exported."""
        return TabularReference(self._table, folder_of)

    def learner(
        self, *, rank: int, ranks: int, store: Path, folder_of: Callable[[int], Path]
    ) -> SharedLearner:
        """The leader alone computes; other ranks are there."""
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
    """With steps long enough for something to happen to a run, and without a busy core per searcher."""

    step_seconds = 0.1

    def generator(self, *, seed: int) -> TabularGenerator:
        """Its steps take time, too."""
        return UnhurriedGenerator(self._table, seed=seed)


class Slow(Unhurried):
    """With steps about as long as those of the quickstart."""

    step_seconds = 0.5


class UnhurriedGenerator(TabularGenerator):
    """A generator that waits before each token, for longest in an evaluation on the test split."""

    def step(self) -> list[Group]:
        """Advance every request by one token; return the groups that are now whole."""
        tested = any(decoding.request.split == "test" for decoding in self._decoding)
        time.sleep(1.0 if tested else 0.05)
        return super().step()
