"""The requests of a run: the prompt of each, how its completions are sampled, and whether it is completed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tba_hpc.config import Config, ConfigError
from tba_hpc.core.ports import Task
from tba_hpc.core.types import Request, Sampling
from tba_hpc.core.wording import count

TEMPERED_SHARE = 0.5
"""Share of requests whose temperature is drawn from generator.tempered_range, if that is set."""

_PROMPT_ORDER = int.from_bytes(b"prompt order")  # keeps this random stream apart from others of the same seed
_TEMPERATURE = int.from_bytes(b"warm")


class CompletedRequests:
    """Set of the completed requests, as a bitmap that grows.

    A request is completed once a sealed shard holds its group, or lists it as set aside.
    """

    def __init__(self) -> None:
        self._done = np.zeros(0, np.uint8)  # may have spare bytes at the end

    @classmethod
    def from_array(cls, packed: np.ndarray) -> CompletedRequests:
        """Make the set from the bitmap that ``to_array`` returned."""
        made = cls()
        made._done = packed.copy()
        return made

    def to_array(self) -> np.ndarray:
        """Return a copy of the bitmap, uint8, one bit per request id, in the order of ``np.packbits``.

        Zero bytes at its end are left out.
        """
        return np.trim_zeros(self._done, "b").copy()

    def add(self, request_ids: np.ndarray | int) -> None:
        """Mark requests (int64, any shape, repeats allowed) as completed."""
        request_ids = np.asarray(request_ids)
        if request_ids.size == 0:
            return
        assert request_ids.min() >= 0, "the number of a request is never negative"
        lacking = int(request_ids.max()) // 8 + 1 - len(self._done)
        if lacking > 0:
            self._done = np.pad(self._done, (0, max(lacking, len(self._done))))
        np.bitwise_or.at(self._done, request_ids // 8, _bit(request_ids))

    def unite(self, other: CompletedRequests) -> None:
        """Mark the requests of ``other`` as completed, too."""
        self.add(np.flatnonzero(np.unpackbits(other.to_array())))

    def __contains__(self, request_id: int) -> bool:
        """Return whether a request is completed."""
        return request_id < 8 * len(self._done) and bool(
            self._done[request_id // 8] & (128 >> request_id % 8)
        )

    def among(self, request_ids: np.ndarray) -> np.ndarray:
        """Return whether each of ``request_ids``, int64, is completed: bool, in their shape."""
        known = request_ids < 8 * len(self._done)
        found = np.zeros(request_ids.shape, bool)
        found[known] = self._done[request_ids[known] // 8] & _bit(request_ids[known])
        return found

    def remaining(self, place: int, places: int) -> Iterator[int]:
        """Yield, without end, the ids ≡ ``place`` (mod ``places``) of requests that are not yet completed.

        Ids ascend. A searcher issues the requests of its place. As a rule no other searcher has that place,
        so no request is issued twice in an attempt. What is not completed is issued again, by the next
        searcher with this place or by the searchers after a resume, even if the number of places has changed.
        """
        return (request_id for request_id in itertools.count(place, places) if request_id not in self)


def _bit(request_ids: np.ndarray) -> np.ndarray:
    """Return for each request the mask, uint8, of its bit in a byte, in the order of ``np.packbits``."""
    return np.right_shift(np.uint8(128), (request_ids % 8).astype(np.uint8))


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run, sent to a searcher when it joins.

    completed: requests that merged shards complete. cursors: index of the next shard to merge, by searcher.
    """

    completed: CompletedRequests = field(default_factory=CompletedRequests)
    cursors: Mapping[int, int] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the progress as bytes for ``from_bytes``."""
        return msgspec.msgpack.encode((self.completed.to_array().tobytes(), self.cursors))

    @classmethod
    def from_bytes(cls, data: bytes) -> Progress:
        """Read what ``to_bytes`` returned. Raises ValueError if ``data`` is truncated."""
        bitmap, cursors = msgspec.msgpack.decode(data, type=tuple[bytes, dict[int, int]])
        return cls(CompletedRequests.from_array(np.frombuffer(bitmap, np.uint8)), cursors)


def prompt_of(request_id: int, *, seed: int, prompts: int) -> int:
    """Return the id of a request's prompt. Each epoch takes all prompts in an order drawn from (seed, epoch).

    prompts: number of training prompts.
    """
    epoch, place = divmod(request_id, prompts)
    return int(_permutation(seed, prompts, epoch)[place])


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, prompts: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, _PROMPT_ORDER, epoch]).permutation(prompts)


def training_requests(
    config: Config, task: Task, searcher: int, completed: CompletedRequests
) -> Iterator[Request]:
    """Yield a searcher's training requests that are not ``completed``, in the run's order, without end.

    searcher: its number in the run.
    """
    prompts = task.prompts("train")
    section = config.generator
    place = config.launch.place_of(searcher)
    for request_id in completed.remaining(place, config.launch.places):
        temperature = _temperature(config, request_id)
        sampling = Sampling(
            temperature,
            section.top_p,
            section.max_tokens,
            section.min_tokens,
            top_logprobs=config.train.score_centering,
        )
        prompt = prompts[prompt_of(request_id, seed=config.run.seed, prompts=len(prompts))]
        yield Request(prompt, request_id, section.completions_per_prompt, sampling)


def _temperature(config: Config, request_id: int) -> float:
    """Return the sampling temperature of a request, which depends only on the seed and the request's id."""
    section = config.generator
    random = np.random.default_rng([config.run.seed, _TEMPERATURE, request_id])
    if section.tempered_range is None or random.random() >= TEMPERED_SHARE:
        return section.temperature
    return float(random.uniform(*section.tempered_range))


def prompt_room(config: Config) -> int:
    """Return the length, in tokens, of the longest prompt that leaves room for the longest completion."""
    return config.model.context_length - config.generator.max_tokens


def refuse_long_prompts(task: Task, config: Config) -> None:
    """Raise ConfigError if a prompt of any split leaves no room for the longest completion."""
    room = prompt_room(config)
    for split in ("train", "validation", "test"):
        longest = max(task.prompts(split), key=lambda prompt: len(prompt.tokens), default=None)
        if longest is not None and len(longest.tokens) > room:
            raise ConfigError(
                f"{split} prompt {longest.id} has {len(longest.tokens)} tokens, but model.context_length="
                f"{config.model.context_length} less generator.max_tokens={config.generator.max_tokens} "
                f"leaves room for {room}: raise model.context_length or lower generator.max_tokens"
            )


def refuse_few_prompts(task: Task, config: Config) -> None:
    """Raise ConfigError if the training prompts are too few for the initial buffer or for a step.

    Also raised if the buffer is a queue that is too small to hold every group until it is used.
    """
    prompts, wanted, buffer = len(task.prompts("train")), config.train.prompts_per_step, config.buffer
    room = prompts * buffer.capacity_per_prompt
    if config.exchange.max_staleness is None and room < buffer.initial_completions:
        raise ConfigError(
            f"buffer.initial_completions={buffer.initial_completions} can never be reached with "
            f"{count(prompts, 'training prompt')} and "
            f"buffer.capacity_per_prompt={buffer.capacity_per_prompt}: lower initial_completions to at most "
            f"{room}, or raise capacity_per_prompt"
        )
    if config.selective and prompts < wanted:
        raise ConfigError(
            f"train.prompts_per_step={wanted} is more than the {prompts} training prompts, and with "
            "max_staleness, replay_limit or reference=reset a step takes at most one group of each: lower it"
        )
    if config.queue:
        _refuse_a_small_queue(config, prompts)


def _refuse_a_small_queue(config: Config, prompts: int) -> None:
    """Raise ConfigError if the buffer is too small to keep every group until a step has learned from it."""
    buffer, size = config.buffer, config.generator.completions_per_prompt
    if buffer.capacity < (needed := config.groups_ahead * size):
        raise ConfigError(
            f"buffer.capacity={buffer.capacity} would drop groups unused: a queue with "
            f"exchange.max_staleness={config.exchange.max_staleness} and train.prompts_per_step="
            f"{config.train.prompts_per_step} may hold {config.groups_ahead} groups; raise the capacity to "
            f"at least {needed} completions, or lower max_staleness or prompts_per_step"
        )
    # An epoch may begin with the prompt that ended the last one.
    groups = (config.groups_ahead - 2) // prompts + 2
    if buffer.capacity_per_prompt < (needed := groups * size):
        raise ConfigError(
            f"buffer.capacity_per_prompt={buffer.capacity_per_prompt} would drop groups unused: a queue of "
            f"{count(config.groups_ahead, 'group')} may hold {groups} of one of the "
            f"{count(prompts, 'training prompt')}; raise it to at least {needed}"
        )
