"""The real trainer and searcher loops on the tabular policy: learning, resume, stop, bad rewards, evaluation.

Only backends are swapped: the engine and the learner are the enumerable ones, the exchange is the one
over files, or one that replays a fixed sequence of shards.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from lab.tabular import Table, TabularGenerator, TabularReference, TabularTask, total_variation
from lab.tabular_learner import TabularLearner

from tba_hpc.commands.replay import Unhurried
from tba_hpc.config import Config, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import ExchangeError, Generator, SearcherExchange, TrainerExchange, Write
from tba_hpc.core.prompts import CompletedRequests, Progress, training_requests
from tba_hpc.core.types import (
    Completion,
    Group,
    Prompt,
    Publication,
    Request,
    Sampling,
    Shard,
    Split,
    WeightUpdate,
)
from tba_hpc.exchange.file_exchange import FileSearcherExchange, FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import PendingShards, ShardWriter, read_arrays, read_shard, write_arrays
from tba_hpc.loops.ending import publish_last
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import merge_pending
from tba_hpc.loops.online_evaluation import LONGEST_TEXT, OnlineEvaluator
from tba_hpc.loops.restoring import Restored
from tba_hpc.loops.scorer import ANSWERS_AT_ONCE, Judged, Scorer
from tba_hpc.loops.searcher import Searcher
from tba_hpc.loops.trainer import MARGIN_SECONDS, Trainer
from tba_hpc.run.background import at_once
from tba_hpc.run.checkpoints import Checkpoints, TrainerState, latest_checkpoint, read_state
from tba_hpc.run.directory import RunDir
from tba_hpc.run.evaluations import Evaluation, find_evaluation, read_part, write_evaluation
from tba_hpc.run.history import History
from tba_hpc.run.metrics import MetricsWriter, read_metrics

TABLE = Table()
BETA = 0.25


def make_config(root: Path, **sections: dict[str, object]) -> Config:
    """Four prompts, K = 8, k = 2, replay half the time."""
    tree: dict[str, dict[str, object]] = {
        "run": {"root": str(root), "name": "loops"},
        "model": {"path": "tabular", "dtype": "float32", "context_length": 8},
        "generator": {"completions_per_prompt": 12, "temperature": 1.0, "max_tokens": TABLE.length},
        "buffer": {"initial_completions": 15, "capacity_per_prompt": 40},
        "train": {
            "steps": 12,
            "prompts_per_step": 4,
            "completions_per_prompt": 8,
            "learning_rate": {"peak": 0.05},
            "beta": BETA,
        },
        "exchange": {"transport": "files", "sync_every": 2, "seal_seconds": 0.01},
        "launch": {"timeout_seconds": 20},
        "checkpoint": {"every": 5},
        "evaluate": {"every": 4, "validation_prompts": 4},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse_config(tree)


def never() -> bool:
    """No stop is asked for."""
    return False


@pytest.fixture(autouse=True)
def saves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is complete before the next step, so that counts are exact."""
    monkeypatch.setattr("tba_hpc.run.checkpoints.in_background", at_once)


@dataclass
class TrainerParts:
    """A trainer as the runtime would build it from the run directory, on the tabular learner."""

    config: Config
    run: RunDir
    learner: TabularLearner = field(default_factory=lambda: TabularLearner(TABLE))
    buffer: ReplayBuffer = field(init=False)

    def build(
        self,
        exchange: TrainerExchange,
        stop_asked: Callable[[], bool] = never,
        *,
        pending: Iterable[Shard] = (),
        job_end: float = math.inf,
        freshness: type[Freshness] = Freshness,
        elastic_leases: Callable[[], dict[int, int]] = dict,
    ) -> Trainer:
        """Restore the newest checkpoint, if there is one."""
        self.buffer = ReplayBuffer(self.config.buffer, 0, queue=self.config.queue)
        completed, state = CompletedRequests(), TrainerState()
        if folder := latest_checkpoint(self.run):
            state = read_state(folder)
            completed = CompletedRequests.from_array(read_arrays(folder / "prompts.h5")["done"])
            self.buffer.restore(read_arrays(folder / "buffer.h5"))
            self.learner.load(folder)
        metrics = MetricsWriter(self.run.metrics_file("trainer"))
        saved = Restored(folder, state, completed, self.buffer)
        merged = merge_pending(self.config, pending, saved, metrics)
        return Trainer(
            self.config,
            learner=self.learner,
            exchange=exchange,
            buffer=self.buffer,
            freshness=freshness(self.config, self.buffer),
            completed=completed,
            state=merged,
            saved=state,
            checkpoints=Checkpoints(self.run, self.config.checkpoint.keep, write_arrays),
            metrics=metrics,
            stop_asked=stop_asked,
            elastic_leases=elastic_leases,
            job_end=job_end,
        )

    def file_exchange(
        self, exchange_of: type[FileTrainerExchange] = FileTrainerExchange
    ) -> FileTrainerExchange:
        """The leader's end over the run directory."""
        return exchange_of(
            self.run.weights,
            self.learner.layout,
            attempt="first",
            read_pending=PendingShards(self.run).read,
            progress=Progress(),
            evaluated=lambda split, step: find_evaluation(self.run, split, step) is not None,
        )


def make_searcher(
    config: Config,
    run: RunDir,
    exchange: SearcherExchange,
    *,
    task: TabularTask | None = None,
    generator: Generator | None = None,
    stop_asked: Callable[[], bool] = never,
    pending_shards: int = 64,
    most_rejected: int = 10,
    call_seconds: float = math.inf,
) -> Searcher:
    """The only searcher of a run, on the tabular policy."""
    task = task or TabularTask(TABLE)
    return Searcher(
        generator=generator or TabularGenerator(TABLE),
        scorer=Scorer(
            task,
            TabularReference(TABLE),
            ShardWriter(run, 0),
            seal_seconds=0.01,
            call_seconds=call_seconds,
            most_rejected=most_rejected,
        ),
        exchange=exchange,
        requests=training_requests(config, task, 0, CompletedRequests()),
        evaluator=OnlineEvaluator(
            task,
            searcher=0,
            searchers=1,
            max_tokens=TABLE.length,
            limits={"validation": config.evaluate.validation_prompts, "test": None},
        ),
        report=partial(write_evaluation, run, 0, 1),
        metrics=MetricsWriter(run.metrics_file("searcher")),
        stop_asked=stop_asked,
        sequences=24,
        pending_shards=pending_shards,
    )


def go(parts: TrainerParts, generator: TabularGenerator | None = None) -> None:
    """A whole run with its last evaluation; the searcher has a thread."""
    config, run = parts.config, parts.run
    exchange = FileSearcherExchange(run.weights, 0, attempt="first", deadline=240)
    searcher = make_searcher(config, run, exchange, generator=generator)
    thread = threading.Thread(target=searcher.run)
    thread.start()
    leader = parts.file_exchange()
    trainer = parts.build(leader)
    assert trainer.run() and publish_last(trainer)
    while find_evaluation(run, "test", config.train.steps) is None:
        time.sleep(0.01)
    leader.close()
    thread.join(240)
    assert not thread.is_alive()


class Paced(TabularGenerator):
    """Leaves the processor to the trainer's thread for a moment before each token."""

    def step(self) -> list[Group]:
        """As ever."""
        time.sleep(0.002)
        return super().step()


def test_a_whole_asynchronous_run_learns_the_target(tmp_path: Path) -> None:
    """Real loops, two threads, stale replayed data: the policy ends near [π_ref^(1/γ)·exp(r/β)]^(1/T)/Z."""
    tempered = {"target_temperature": {0: 2.0, 100: 1.25}, "reference_temperature": 2.0}
    target_PC = TABLE.optimum(BETA * 1.25, power=1 / (2 * 1.25))
    config = make_config(tmp_path, train={"steps": 400, **tempered}, generator={"tempered_range": [0.5, 2.0]})
    run = RunDir.create(config)
    parts = TrainerParts(config, run)
    before = total_variation(parts.learner.policy_PC, target_PC).max()
    go(parts, Paced(TABLE))
    after = total_variation(parts.learner.policy_PC, target_PC).max()
    assert before > 0.3 and after < 0.1  # .002 to .003; .034 where the machine was busy
    steps = History.read(run).steps
    assert [record["step"] for record in steps] == list(range(1, 401))
    assert max(float(record["staleness/max"]) for record in steps) > config.exchange.sync_every


def test_an_engine_step_longer_than_a_record_is_no_share_beyond_one(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run, generator = RunDir.create(config), TabularGenerator(TABLE)
    exchange = FileSearcherExchange(run.weights, 0, attempt="first", deadline=240)
    searcher = make_searcher(config, run, exchange, generator=generator)
    generator.busy_seconds = 25.0
    for _ in range(3):
        searcher._logged = time.monotonic() - 10
        searcher._log()
    records = read_metrics(run.metrics_file("searcher"))
    assert [record["search/busy_share"] for record in records] == pytest.approx([1, 1, 0.5], abs=0.01)


def test_evaluations_use_exactly_the_named_weights(tmp_path: Path) -> None:
    """Greedy pass@1 of every recorded step equals that of the policy which the checkpoint holds."""
    config = make_config(tmp_path, train={"steps": 40}, evaluate={"every": 8}, checkpoint={"every": 8})
    run = RunDir.create(config)
    parts = TrainerParts(config, run)
    go(parts)
    last = find_evaluation(run, "test", 40)
    first = find_evaluation(run, "test", 0)
    assert first is not None and last is not None
    for found, logits_PSV in ((first, TABLE.ref_logits_PSV), (last, parts.learner.policy_logits)):
        correct, perplexity = _greedy(logits_PSV)
        assert found.correct == correct and found.perplexity == pytest.approx(perplexity, rel=1e-6)


class Skewed(TabularGenerator):
    """An engine whose log-probabilities are all ``nats`` too high."""

    def __init__(self, nats: float) -> None:
        super().__init__(TABLE)
        self._nats = np.float32(nats)

    def step(self) -> list[Group]:
        """As ever, but skewed."""
        return [
            replace(
                group,
                completions=tuple(replace(c, logprobs=c.logprobs + self._nats) for c in group.completions),
            )
            for group in super().step()
        ]


@pytest.mark.parametrize("nats", [0.0, 0.125])
@pytest.mark.parametrize("staleness", [0, None])
def test_the_gap_between_engine_and_learner_is_measured(
    nats: float, staleness: int | None, tmp_path: Path
) -> None:
    """By the searcher at evaluations; by the trainer where it learns from its own weights' completions."""
    config = make_config(
        tmp_path, exchange={"max_staleness": staleness, "sync_every": 2 if staleness is None else 1}
    )
    run = RunDir.create(config)
    go(TrainerParts(config, run), Skewed(nats))
    searched = read_metrics(run.metrics_file("searcher"))
    found = [float(record["search/engine_gap"]) for record in searched if "search/engine_gap" in record]
    assert found == pytest.approx([nats] * len(found), abs=1e-6) and found
    steps = History.read(run).steps
    gaps = {
        int(record["step"]): float(record["train/engine_gap"])
        for record in steps
        if "train/engine_gap" in record
    }
    assert gaps and list(gaps.values()) == pytest.approx([nats] * len(gaps), abs=1e-6)
    assert 1 in gaps
    if staleness == 0:
        assert len(gaps) == len(steps)
        lengths = [float(record["train/length"]) for record in steps]
        assert all(float(record["train/replay_ratio"]) == 1 for record in steps)
        assert nats or min(float(record["train/ess"]) for record in steps) > 1 - 1e-5
        assert 1 <= min(lengths) <= max(lengths) <= TABLE.length


def _greedy(logits_PSV: np.ndarray) -> tuple[int, float]:
    """Greedy completions, followed token by token: how many have the highest reward; their perplexity."""
    task, correct, ref_logprobs = TabularTask(TABLE), 0, []
    for prompt in task.prompts("test"):
        tokens: list[int] = []
        while len(tokens) < TABLE.length and TABLE.eos not in tokens:
            prefix = TABLE.prefixes(np.array([[*tokens, 0]]))[0, -1]
            tokens.append(int(logits_PSV[prompt.id, prefix].argmax()))
        reason = "stop" if tokens[-1] == TABLE.eos else "length"
        completion = Completion(np.array(tokens, np.int32), np.zeros(len(tokens), np.float32), reason)
        correct += sum(task.correct([prompt], [completion]))
        ref_logprobs.append(TABLE.token_logprobs(TABLE.ref_logits_PSV, prompt.id, completion.tokens))
    return correct, float(np.exp(-np.concatenate(ref_logprobs).mean()))


# --- Resume ---


class ReplayExchange:
    """A TrainerExchange whose n-th publish brings the shards sealed as n-th: a fixed sequence."""

    def __init__(self, shards: list[Shard], published: int) -> None:
        self._shards = shards
        self._published = published
        self._arrived: deque[Shard] = deque()
        self.stop_requested = False

    def publish(self, publication: Publication, write: Write) -> bool:
        """Deliver the next shard."""
        write(np.empty(TabularLearner(TABLE).layout.nbytes, np.uint8))
        self._arrived.append(self._shards[self._published])
        self._published += 1
        return True

    def gather(self) -> bool:
        """Nothing arrives between two publishes."""
        return True

    def collect(self) -> list[Shard]:
        """What the last publish brought."""
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        """Nothing is held."""


def _sealed(config: Config, run: RunDir, count: int) -> list[Shard]:
    """Shards of the untrained policy, one per four prompts."""
    task, generator, writer = TabularTask(TABLE), TabularGenerator(TABLE), ShardWriter(run, 0)
    reference, requests = TabularReference(TABLE), training_requests(config, task, 0, CompletedRequests())
    shards = []
    for _ in range(count):
        for _ in range(4):
            generator.submit(next(requests))
        while generator.in_flight:
            for group in generator.step():
                rewards = task.rewards(group.request.prompt, group.completions)
                writer.append(group, rewards, reference.logprobs(group))
        shards.append(writer.seal())
    return [shard for shard in shards if shard is not None]


def _losses(run: RunDir) -> list[tuple[float, ...]]:
    names = ("step", "train/loss", "train/grad_norm", "train/reward", "staleness/mean", "buffer/size")
    records = History.read(run).steps
    return [tuple(float(record[name]) for name in names) for record in records]  # type: ignore[arg-type]


def test_a_publish_that_is_put_off_stays_due(tmp_path: Path) -> None:
    """Its rollout budget is granted already: without it searchers and trainer would wait for each other."""
    config = make_config(tmp_path, exchange={"max_staleness": 8})
    run = RunDir.create(config)
    exchange = ReplayExchange(_sealed(config, run, 2), 0)
    trainer = TrainerParts(config, run).build(exchange)
    trainer.freshness.begin(0, trainer.completed)
    due, begun = trainer._schedule.due, trainer.state
    assert trainer.publish_if_due()
    assert not due(0), "the first weights are out, and searchers have all that is missing"
    busy = pytest.MonkeyPatch()
    busy.setattr(exchange, "publish", lambda publication, write: False)
    trainer.state = replace(begun, step=2)
    assert not trainer.publish_if_due()
    trainer.state = begun
    assert due(0), "only because it was put off"
    busy.undo()
    assert trainer.publish_if_due() and not due(0)


@pytest.mark.parametrize(
    ("stop_at", "buffer"), [(2, {}), (4, {"replay_limit": 3, "duplicates": "none"}), (10, {})]
)
def test_a_resumed_run_equals_the_continued_one_bit_by_bit(
    stop_at: int, buffer: dict[str, object], tmp_path: Path
) -> None:
    config = make_config(tmp_path / "whole", buffer=buffer)
    whole = TrainerParts(config, RunDir.create(config))
    shards = _sealed(config, whole.run, 10)
    assert whole.build(ReplayExchange(shards, 0)).run()

    config = make_config(tmp_path / "parts", buffer=buffer)
    run = RunDir.create(config)
    first = TrainerParts(config, run)
    reached = [False]
    stopped = first.build(ReplayExchange(shards, 0), stop_asked=lambda: _losses_reach(run, stop_at, reached))
    assert not stopped.run()
    second = TrainerParts(config, run)
    assert second.build(ReplayExchange(shards, stop_at // 2)).run()

    assert _losses(run) == _losses(whole.run)
    assert len(_losses(run)) == config.train.steps
    np.testing.assert_array_equal(second.learner.policy_logits, whole.learner.policy_logits)
    for name, array in whole.buffer.state().items():
        np.testing.assert_array_equal(second.buffer.state()[name], array, err_msg=name)
    events = {record.get("event") for record in read_metrics(run.metrics_file("trainer"))}
    assert ("evicted" in events) == ("replay_limit" in buffer)


def _losses_reach(run: RunDir, step: int, reached: list[bool]) -> bool:
    reached[0] = reached[0] or len(_losses(run)) >= step
    return reached[0]


# --- What is most recent ---


class Trickle(ReplayExchange):
    """Every publish brings three shards, of which each look at the exchange finds one."""

    def publish(self, publication: Publication, write: Write) -> bool:
        """Three at once."""
        self._arrived += self._shards[self._published : self._published + 3]
        self._published += 3
        return True

    def collect(self) -> list[Shard]:
        """The next."""
        return [self._arrived.popleft()] if self._arrived else []


def test_a_sync_is_what_arrived_between_two_publishes_in_however_many_collections(tmp_path: Path) -> None:
    """Weights of steps 0, 2 and 4, with nine shards; each shard is a revision of its own."""
    config = make_config(tmp_path, train={"steps": 6})
    parts = TrainerParts(config, RunDir.create(config))
    assert parts.build(Trickle(_sealed(config, parts.run, 9), 0)).run()
    stored = parts.buffer.state()["record"]
    shard_N = (stored["uid"] >> 20 & 0xFFFFFF).astype(int)
    np.testing.assert_array_equal(stored["sync"], 2 * (shard_N // 3))
    np.testing.assert_array_equal(stored["revision"], shard_N + 1)
    assert set(shard_N[stored["sync"] == 4]) == {6, 7}, "the ninth would have come before the next publish"


# --- Data before steps ---


class Slow(ReplayExchange):
    """Only the first publish of the run brings a shard; then each does that is waited for long enough."""

    def __init__(self, shards: list[Shard], published: int = 0) -> None:
        super().__init__(shards, published)
        self.looks = 0

    def publish(self, publication: Publication, write: Write) -> bool:
        """Bring nothing, after the first."""
        return self._published > 0 or super().publish(publication, write)

    def gather(self) -> bool:
        """Called in waits alone: the fifth time there is a shard."""
        self.looks += 1
        if self.looks % 5 == 0:
            self._arrived.append(self._shards[self._published])
            self._published += 1
        return True


def _steps_of(run: RunDir, event: str) -> list[object]:
    return [r["step"] for r in read_metrics(run.metrics_file("trainer")) if r.get("event") == event]


def test_the_trainer_waits_for_a_shard_after_so_many_steps_without_and_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three: it waits before steps 3 and 6; stopped at 8 and resumed, before 8 and before 11."""
    monkeypatch.setattr("tba_hpc.loops.freshness.STEPS_WITHOUT_DATA", 3)
    monkeypatch.setattr("tba_hpc.loops.freshness.SYNCS_WITHOUT_DATA", 0)
    config = make_config(tmp_path, train={"steps": 13})
    run = RunDir.create(config)
    shards, reached = _sealed(config, run, 5), [False]
    first = Slow(shards)
    assert not TrainerParts(config, run).build(first, lambda: _losses_reach(run, 8, reached)).run()
    assert (first.looks, _steps_of(run, "waiting"), _steps_of(run, "merged")) == (10, [3, 6], [0, 3, 6])
    second = Slow(shards, published=3)
    assert TrainerParts(config, run).build(second).run()
    assert (second.looks, _steps_of(run, "waiting")) == (10, [3, 6, 8, 11])
    assert _steps_of(run, "merged") == [0, 3, 6, 8, 11]
    assert len(_losses(run)) == 13


class Starting(Slow):
    """An exchange whose searchers need a second until they deliver."""

    def gather(self) -> bool:
        """Called in waits alone."""
        time.sleep(0.1)
        return self.looks >= 10 or super().gather()

    def publish(self, publication: Publication, write: Write) -> bool:
        """Bring nothing."""
        return True


def test_the_first_step_begins_when_completions_have_arrived(tmp_path: Path) -> None:
    config = make_config(tmp_path, train={"steps": 2})
    run = RunDir.create(config)
    parts, exchange = TrainerParts(config, run), Starting(_sealed(config, run, 2))
    began = time.monotonic()
    assert parts.build(exchange).run() and exchange.looks >= 5 and time.monotonic() - began > 0.5
    records = read_metrics(run.metrics_file("trainer"))
    seconds = [record["time/step_seconds"] for record in records if "time/step_seconds" in record]
    assert len(seconds) == 2 and sum(seconds) < 0.4


def test_a_replay_that_is_resumed_waits_for_no_shard(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunDir.create(config)
    shards, reached = _sealed(config, run, 1), [False]
    assert not TrainerParts(config, run).build(Slow(shards), lambda: _losses_reach(run, 3, reached)).run()
    resumed = Slow(shards, published=1)
    assert TrainerParts(config, run).build(resumed, freshness=Unhurried).run() and resumed.looks == 0


# --- Stop ---


def test_a_stop_saves_what_is_new_and_nothing_twice(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunDir.create(config)
    shards = _sealed(config, run, 4)

    def checkpoints_after(stop_asked: Callable[[TrainerParts], bool]) -> list[str]:
        parts = TrainerParts(config, run)
        assert not parts.build(ReplayExchange(shards, 0), lambda: stop_asked(parts)).run()
        return sorted(folder.name for folder in run.checkpoints.iterdir())

    assert checkpoints_after(lambda parts: True) == []
    assert checkpoints_after(lambda parts: len(parts.buffer) > 0) == ["step-000000"]
    every = f"step-{config.checkpoint.every:06d}"  # asked to stop while it was being written
    assert checkpoints_after(lambda parts: every in str(latest_checkpoint(run))) == ["step-000000", every]
    assert checkpoints_after(lambda parts: True) == ["step-000000", every]
    assert [record.get("event") for record in read_metrics(run.metrics_file("trainer"))][-1] == "resumed"


@pytest.mark.parametrize(("spare", "late"), [(600.0, False), (-0.1, True), (math.inf, False)])
def test_a_step_is_begun_only_where_a_save_still_fits(spare: float, late: bool) -> None:
    trainer = SimpleNamespace(
        _saving=SimpleNamespace(under_way=False, seconds=40.0),
        _step_log=SimpleNamespace(longest_step=7.0),
        job_end=time.monotonic() + 7 + 40 + MARGIN_SECONDS + spare,
    )
    assert vars(Trainer)["_is_late"].fget(trainer) == late


def test_the_end_of_the_job_stops_the_run_and_the_time_of_a_save_is_learned(tmp_path: Path) -> None:
    config = make_config(
        tmp_path, train={"steps": 10**6}, exchange={"sync_every": 10**6}, checkpoint={"every": 10**6}
    )
    run = RunDir.create(config)
    shards = _sealed(config, run, 2)
    reached = 0
    for start in range(2):
        end = time.time() + MARGIN_SECONDS + 2
        assert not TrainerParts(config, run).build(ReplayExchange(shards, start), job_end=end).run()
        assert time.time() < end
        folder = latest_checkpoint(run)
        assert folder is not None
        state = read_state(folder)
        assert state.step > reached and 0 < state.save_seconds < MARGIN_SECONDS
        reached = state.step


class Killed(Exception):
    """The end of a start without a word."""


def test_a_start_that_ends_before_its_first_checkpoint_still_counts(tmp_path: Path) -> None:
    """What it sealed is merged, and not issued again, by the next."""
    config = make_config(tmp_path)
    run = RunDir.create(config)
    shards, dying = _sealed(config, run, 3), TrainerParts(config, run)

    def dies() -> bool:
        if len(_losses(run)) == config.checkpoint.every - 1:
            raise Killed
        return False

    with pytest.raises(Killed):
        dying.build(ReplayExchange(shards, 0), dies).run()
    assert latest_checkpoint(run) is None
    pending = PendingShards(run).read_all({})
    TrainerParts(config, run).build(ReplayExchange(shards, 0), lambda: True, pending=pending).run()
    folder = latest_checkpoint(run)
    assert folder is not None and read_state(folder).cursors == {0: 3}
    completed = CompletedRequests.from_array(read_arrays(folder / "prompts.h5")["done"])
    assert next(training_requests(config, TabularTask(TABLE), 0, completed)).id == 12


def test_part_of_the_prompts_is_sampled_at_other_temperatures(tmp_path: Path) -> None:
    """Half of them, uniformly within the range, and the same ones whoever asks, and when."""
    section = {"temperature": 0.9, "tempered_range": [0.5, 2.0], "min_tokens": 2}
    config, draws = make_config(tmp_path, generator=section), 4000
    task = TabularTask(TABLE)
    requests = list(islice(training_requests(config, task, 0, CompletedRequests()), draws))
    warm = [request.sampling.temperature for request in requests if request.sampling.temperature != 0.9]
    assert abs(len(warm) - 0.5 * draws) < 4 * math.sqrt(draws * 0.5 * 0.5)
    counts, _ = np.histogram(warm, bins=10, range=(0.5, 2.0))
    assert counts.sum() == len(warm)
    assert ((counts - len(warm) / 10) ** 2 / (len(warm) / 10)).sum() < 33.7  # 1e-4 by 9 degrees of freedom
    assert {request.sampling.min_tokens for request in requests} == {2}
    completed = CompletedRequests()
    completed.add(np.arange(100))
    assert next(training_requests(config, task, 0, completed)).sampling == requests[100].sampling


class Endless(TabularGenerator):
    """Never finishes a completion."""

    def step(self) -> list[Group]:
        """Time passes."""
        time.sleep(0.001)
        return []


def test_a_searcher_leaves_its_evaluation_when_the_trainer_ends_the_run(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunDir.create(config)
    exchange = OneShot(wanted=0, version=12, evaluate="test")
    make_searcher(config, run, exchange, generator=Endless(TABLE)).run()
    assert exchange.polled and find_evaluation(run, "test", 12) is None


def test_it_leaves_its_evaluation_even_if_newer_weights_wait(tmp_path: Path) -> None:
    """Weights are not taken during an evaluation, and only the trainer's process was asked to stop."""
    config = make_config(tmp_path)
    run = RunDir.create(config)
    parts = TrainerParts(config, run)
    exchange = FileSearcherExchange(run.weights, 0, attempt="first", deadline=240)
    searcher = make_searcher(config, run, exchange, generator=Endless(TABLE))
    leader = parts.file_exchange()
    thread = threading.Thread(target=searcher.run, daemon=True)
    for publication in (Publication(version=0, evaluate="test"), Publication(version=2)):
        while not leader.publish(publication, parts.learner.write_weights):
            time.sleep(0.01)
        if publication.evaluate:
            thread.start()
            while not searcher.evaluator.busy:
                time.sleep(0.01)
    leader.close()
    thread.join(20)
    assert not thread.is_alive() and find_evaluation(run, "test", 0) is None


@pytest.mark.parametrize("version", [7, 12])
def test_with_the_last_weights_nothing_but_their_evaluation_is_generated(
    version: int, tmp_path: Path
) -> None:
    """Step 7 is somewhere in the run, step 12 its end."""
    config = make_config(tmp_path)
    run = RunDir.create(config)
    exchange = OneShot(wanted=0, closes=False, version=version, evaluate="test")
    searcher = make_searcher(config, run, exchange)
    thread = threading.Thread(target=searcher.run)
    thread.start()
    path = run.evaluations / f"test-step-{version:06d}.json"
    while not path.exists():
        time.sleep(0.01)
    time.sleep(0.3)
    exchange.closes = True
    thread.join(240)
    assert not thread.is_alive()
    assert bool(exchange.offered) == (version == 7)
    prompts = len(TabularTask(TABLE).prompts("test"))
    assert json.loads(path.read_text())["total"] == prompts


# --- Judging beside generation ---


class Judge(TabularTask):
    """Notes what it is asked, in order; the first judgement takes until it is let go."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.asked: list[int | str] = []
        self.at_work, self.go = threading.Event(), threading.Event()

    def rewards(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """The table's."""
        self.asked.append("rewards")
        return super().rewards(prompt, completions)

    def correct(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[bool]:
        """As ever, but slow at first."""
        self.asked.append(len(prompts))
        self.at_work.set()
        assert self.go.wait(20)
        return TabularTask(TABLE).correct(prompts, completions)


def answers(split: Split, version: int, prompts: Sequence[Prompt]) -> list[Group]:
    """Greedy answers of the reference, said to come from the weights of ``version``."""
    generator, sampling = TabularGenerator(TABLE), Sampling(0.0, 1.0, TABLE.length)
    generator.version = version
    for prompt in prompts:
        generator.submit(Request(prompt, prompt.id, 1, sampling, split))
    groups: list[Group] = []
    while generator.in_flight:
        groups += generator.step()
    return sorted(groups, key=lambda group: group.request.id)


def test_answers_are_judged_in_batches_and_training_groups_have_their_turn(tmp_path: Path) -> None:
    judge, run = Judge(), RunDir.create(make_config(tmp_path))
    scorer = Scorer(judge, TabularReference(TABLE), ShardWriter(run, 0), seal_seconds=60)
    queued = answers("test", 0, judge.prompts("test")) * 10
    scorer.judge(queued[0])
    assert scorer.judged() == [] and judge.at_work.wait(20)
    for group in answers("train", 0, judge.prompts("train")):
        scorer.submit(group)
    for answer in queued[1:]:
        scorer.judge(answer)
    assert scorer.judged() == [] == scorer.finished()  # neither waits for the judgement
    judge.go.set()
    judged: list[Judged] = []
    while len(judged) < len(queued):
        judged += scorer.judged()
        time.sleep(0.001)
    scorer.close()
    groups, rest = len(judge.prompts("train")), len(queued) - 1 - 2 * ANSWERS_AT_ONCE
    assert judge.asked == [1, *["rewards"] * groups, ANSWERS_AT_ONCE, ANSWERS_AT_ONCE, rest]
    assert [one.answer for one in judged] == queued


def test_an_evaluation_may_begin_before_the_one_before_is_judged() -> None:
    task = TabularTask(TABLE)
    evaluator = OnlineEvaluator(
        task, searcher=0, searchers=2, max_tokens=3, limits={"test": None, "validation": None}
    )
    splits: list[tuple[Split, int]] = [("validation", 4), ("test", 8)]
    for split, step in splits:
        assert evaluator.start(split, step) is None
        while evaluator.busy:
            assert evaluator.next_request()
            evaluator.note_answer()
    prompts = task.prompts("test")
    late = [*answers("test", 8, prompts[::2]), *answers("validation", 4, prompts[::2])]
    test, validation = [part for answer in late if (part := evaluator.count(answer, True, -1.5))]
    assert (test.split, test.total) == ("test", len(prompts[::2]))
    assert (test.results, validation.results) == ({prompt.id: 1.0 for prompt in prompts[::2]}, {})
    assert validation.correct == len(prompts[::2])
    assert validation.ref_logprob == -1.5 * len(prompts[::2])


def test_what_an_earlier_attempt_has_evaluated_is_not_evaluated_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run, task = RunDir.create(config), TabularTask(TABLE)
    done = Evaluation(split="test", step=12, correct=1, total=2, tokens=6, truncated=0)
    write_evaluation(run, 0, 2, done)
    evaluator = OnlineEvaluator(
        task,
        searcher=0,
        searchers=2,
        max_tokens=3,
        limits={"test": None, "validation": None},
        done=partial(read_part, run, 0, 2),
    )
    assert evaluator.start("test", 12) == done and not evaluator.busy
    assert evaluator.start("test", 11) is None and evaluator.busy


def test_a_few_answers_are_kept_in_words_until_the_evaluation_is_whole(tmp_path: Path) -> None:
    run, task = RunDir.create(make_config(tmp_path)), TabularTask(TABLE)
    prompts = task.prompts("test")
    for place in range(2):
        evaluator = OnlineEvaluator(
            task,
            searcher=place,
            searchers=2,
            max_tokens=3,
            limits={"test": None},
            decode=lambda tokens: "-".join(map(str, tokens)) * 2999,
            kept=3,
        )
        assert evaluator.start("test", 8) is None
        for answer in answers("test", 8, prompts[place::2]):
            part = evaluator.count(answer, answer.request.prompt.id == 1, None)
        assert part and len(part.answers) == len(range(place, 3, 2))
        write_evaluation(run, place, 2, part)
    whole = find_evaluation(run, "test", 8)
    assert whole and [(a.prompt, a.correct) for a in whole.answers] == [(0, False), (1, True), (2, False)]
    for kept in whole.answers:
        question = "-".join(map(str, prompts[kept.prompt].tokens)) * 2999
        assert kept.question == question[:LONGEST_TEXT] and len(kept.text) == LONGEST_TEXT


def test_correct_answers_that_a_limit_cut_off_are_counted_apart() -> None:
    """Of four answers three are right; a limit of tokens and one of turns cut off one of these each."""
    task = TabularTask(TABLE)
    evaluator = OnlineEvaluator(task, searcher=0, searchers=1, max_tokens=3, limits={"test": 4})
    assert evaluator.start("test", 8) is None
    found = answers("test", 8, task.prompts("test")[:4])
    for answer, correct, reason in zip(found, (1, 1, 1, 0), ("stop", "length", "turns", "stop"), strict=True):
        (completion,) = answer.completions
        cut = replace(answer, completions=(replace(completion, finish_reason=reason),))
        part = evaluator.count(cut, bool(correct), None)
    assert part and (part.score, part.ended_score, part.truncated) == (3 / 4, 1 / 4, 1)


# --- What goes wrong ---


def test_completions_that_only_push_others_out_do_not_keep_a_run_waiting(tmp_path: Path) -> None:
    """Four prompts have room for 32 of the 33 initial ones; a shard comes every tenth of a second."""
    buffer = {"initial_completions": 33, "capacity_per_prompt": 8}
    config = make_config(tmp_path, buffer=buffer, launch={"timeout_seconds": 0.5})
    run = RunDir.create(config)
    sentence = (
        r"initial completions and no new one .* another run \(run.name\) with a lower buffer.initial_comp"
    )
    with pytest.raises(ExchangeError, match=sentence):
        TrainerParts(config, run).build(Slow(_sealed(config, run, 30))).run()
    assert latest_checkpoint(run) is None, "without a step there is nothing to save"


class Silent(Slow):
    """Brings the first publish's shard, and then no other. Each look at it takes a second."""

    def gather(self) -> bool:
        """Called in waits alone."""
        self.looks += 1
        return True

    def monotonic(self) -> float:
        """Return the seconds of all looks."""
        return 1000.0 + self.looks

    def sleep(self, seconds: float) -> None:
        """Return at once."""

    def time(self) -> float:
        """Return the same."""
        return self.monotonic()


@pytest.mark.parametrize(("searchers", "present", "times"), [(0, False, 6), (0, True, 1), (1, False, 1)])
def test_a_trainer_whose_searchers_are_all_elastic_waits_longer_for_one_and_then_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, searchers: int, present: bool, times: int
) -> None:
    """After three steps on the only shard; one of the run's own, or one that is present, should answer."""
    monkeypatch.setattr("tba_hpc.loops.freshness.STEPS_WITHOUT_DATA", 3)
    monkeypatch.setattr("tba_hpc.loops.freshness.SYNCS_WITHOUT_DATA", 0)
    launch: dict[str, object] = {"timeout_seconds": 20, "searchers": searchers, "elastic": 1}
    config = make_config(tmp_path, launch=launch)
    run = RunDir.create(config)
    silent = Silent(_sealed(config, run, 1))
    monkeypatch.setattr("tba_hpc.loops.trainer.time", silent)
    leases = {5000: 1} if present else {}
    trainer = TrainerParts(config, run).build(silent, elastic_leases=lambda: leases)
    sentence = rf"no new one has arrived for {20 * times + 1} s.* add one: tba search"
    with pytest.raises(ExchangeError, match=sentence):
        trainer.run()
    assert _steps_of(run, "waiting") == [3] and latest_checkpoint(run) == run.checkpoints / "step-000003"


class Returning(Silent):
    """After some looks an elastic searcher is present, and brings shards from its fifteenth look on."""

    def gather(self) -> bool:
        """Called in waits alone."""
        if self.looks >= self.returns + 15 and self._published < len(self._shards):
            self._arrived.append(self._shards[self._published])
            self._published += 1
        return super().gather()

    returns = 50

    def leases(self) -> dict[int, int]:
        """Return the lease of the searcher once it is back."""
        return {5000: 1} if self.looks >= self.returns else {}


def test_an_elastic_searcher_that_comes_back_has_time_to_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout of 20 looks has passed twice when it comes, and it needs fifteen more."""
    monkeypatch.setattr("tba_hpc.loops.freshness.STEPS_WITHOUT_DATA", 3)
    monkeypatch.setattr("tba_hpc.loops.freshness.SYNCS_WITHOUT_DATA", 0)
    launch: dict[str, object] = {"timeout_seconds": 20, "searchers": 0, "elastic": 1}
    config = make_config(tmp_path, train={"steps": 6}, launch=launch)
    run = RunDir.create(config)
    back = Returning(_sealed(config, run, 4))
    monkeypatch.setattr("tba_hpc.loops.trainer.time", back)
    trainer = TrainerParts(config, run).build(back, elastic_leases=back.leases)
    assert trainer.run() and back.looks >= back.returns + 15


def test_a_shard_that_arrives_as_the_time_is_up_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer was stopped for an hour, and the shard lies there when it goes on."""
    monkeypatch.setattr("tba_hpc.loops.freshness.STEPS_WITHOUT_DATA", 3)
    monkeypatch.setattr("tba_hpc.loops.freshness.SYNCS_WITHOUT_DATA", 0)
    config = make_config(tmp_path, train={"steps": 6}, launch={"timeout_seconds": 20})
    run = RunDir.create(config)

    class Stopped(Slow):
        """Every look finds a shard, an hour later."""

        def gather(self) -> bool:
            self.looks += 1
            self._arrived.append(self._shards[self._published])
            self._published += 1
            return True

        def monotonic(self) -> float:
            return 3600.0 * (1 + self.looks)

        time, sleep = monotonic, lambda self, seconds: None

    stopped = Stopped(_sealed(config, run, 4))
    monkeypatch.setattr("tba_hpc.loops.trainer.time", stopped)
    assert TrainerParts(config, run).build(stopped).run()


def test_the_silence_is_told_even_if_the_state_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tba_hpc.loops.freshness.STEPS_WITHOUT_DATA", 3)
    monkeypatch.setattr("tba_hpc.loops.freshness.SYNCS_WITHOUT_DATA", 0)
    config = make_config(tmp_path, launch={"timeout_seconds": 20})
    run = RunDir.create(config)
    silent = Silent(_sealed(config, run, 1))
    monkeypatch.setattr("tba_hpc.loops.trainer.time", silent)
    trainer = TrainerParts(config, run).build(silent)
    monkeypatch.setattr(trainer, "_save_last", lambda: 1 / 0)
    with pytest.raises(ExchangeError, match="got no shard in the last 3 steps"):
        trainer.run()
    assert "the state of step 3 could not be saved" in caplog.text


@pytest.mark.parametrize(("step_seconds", "told"), [(0.5, 11), (9.0, 28)])
def test_a_wait_is_an_event_once_it_is_much_longer_than_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_seconds: float, told: int
) -> None:
    """The only shard suffices for a step or two; the next waits for groups."""
    config = make_config(tmp_path, launch={"timeout_seconds": 60}, buffer={"replay_limit": 2})
    run = RunDir.create(config)
    silent, looks = Silent(_sealed(config, run, 2)), list[int]()
    monkeypatch.setattr("tba_hpc.loops.trainer.time", silent)
    trainer = TrainerParts(config, run).build(silent)
    write, log_event = trainer._step_log.write, trainer.log_event

    def note(event: str) -> None:
        if event == "waiting":
            looks.append(silent.looks)
        log_event(event)

    monkeypatch.setattr(trainer._step_log, "write", lambda *given: write(*given) * 0 + step_seconds)
    monkeypatch.setattr(trainer, "log_event", note)
    with pytest.raises(ExchangeError):
        trainer.run()
    assert looks == [told]


@dataclass
class OneShot:
    """A SearcherExchange that gives the reference's weights once and closes when enough has been offered."""

    wanted: int
    closes: bool = True
    version: int = 7
    evaluate: Split | None = None
    offered: list[Shard] = field(default_factory=list)
    polled: bool = False

    def poll(self) -> WeightUpdate | None:
        """The weights, once."""
        if self.polled:
            return None
        self.polled = True
        data = TABLE.ref_logits_PSV.reshape(-1).view(np.uint8)
        layout = TabularLearner(TABLE).layout
        publication = Publication(version=self.version, evaluate=self.evaluate, final=self.version == 12)
        return WeightUpdate(publication, layout, data)

    def offer(self, shard: Shard) -> None:
        """Keep it."""
        self.offered.append(shard)

    def request_stop(self) -> None:
        """Nobody to ask."""

    @property
    def pending(self) -> int:
        """Nothing is ever merged."""
        return len(self.offered)

    @property
    def ended(self) -> bool:
        """Whether enough has come."""
        enough = sum(len(shard.trajectories) for shard in self.offered) >= self.wanted
        return self.polled and self.closes and enough

    closed = ended


def test_a_searcher_pauses_at_the_bound_on_unmerged_shards(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunDir.create(config)
    exchange = OneShot(wanted=1, closes=False)
    thread = threading.Thread(target=make_searcher(config, run, exchange, pending_shards=3).run)
    thread.start()
    while len(exchange.offered) < 3:
        time.sleep(0.01)
    time.sleep(0.5)  # what is in flight when the bound is met may still fill a few shards
    offered = len(exchange.offered)
    exchange.closes = True
    thread.join(240)
    assert not thread.is_alive() and offered <= 6


def test_every_request_is_sealed_once(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    run = RunDir.create(config)
    make_searcher(config, run, OneShot(wanted=500)).run()
    shards = [read_shard(path).trajectories for path in run.shard_files().values()]
    groups = [np.unique(shard.record["request_id"], return_counts=True) for shard in shards]
    request_ids = np.concatenate([request_ids for request_ids, _ in groups])
    assert len(set(request_ids.tolist())) == len(request_ids)
    assert all((counts == 12).all() for _, counts in groups)


class Watched(TabularGenerator):
    """Notes how full it is."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.seen: list[int] = []

    def step(self) -> list[Group]:
        """As ever."""
        self.seen.append(self.in_flight)
        return super().step()


def test_an_engine_is_kept_full_while_groups_wait_for_their_last_completion(tmp_path: Path) -> None:
    config, generator = make_config(tmp_path), Watched()
    run, exchange = RunDir.create(config), OneShot(wanted=500)
    make_searcher(config, run, exchange, generator=generator, pending_shards=1000).run()
    assert min(generator.seen) >= 24 and max(generator.seen) < 24 + 12
