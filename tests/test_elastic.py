"""Searchers that come and go, part by part: places, requests over any history, exchange, what is merged."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from children import Child, children, stay
from test_hdf5_shards import scored

from tba_hpc.config import FIRST_ELASTIC, Config, ConfigError, is_elastic, parse_config
from tba_hpc.core.buffer import ReplayBuffer
from tba_hpc.core.ports import ExchangeError
from tba_hpc.core.prompts import CompletedRequests, Progress
from tba_hpc.core.types import Group, Publication, Shard, Split, WeightLayout, WeightUpdate
from tba_hpc.core.weight_files import WeightFile
from tba_hpc.exchange.file_exchange import ElasticSearcherExchange, FileSearcherExchange, FileTrainerExchange
from tba_hpc.exchange.hdf5_shards import PendingShards, ShardWriter
from tba_hpc.exchange.hybrid_exchange import HybridTrainerExchange
from tba_hpc.loops.elastic import (
    ElasticSearchers,
    EvaluatorLease,
    NoSlotError,
    has_no_launcher,
    leased_slot,
    leaving_at_once,
)
from tba_hpc.loops.freshness import Freshness
from tba_hpc.loops.merger import Merger
from tba_hpc.report.run_state import RunMonitor, run_state
from tba_hpc.report.status import facts, figures
from tba_hpc.run import owners
from tba_hpc.run.checkpoints import TrainerState
from tba_hpc.run.directory import ATTEMPT, RunDir
from tba_hpc.run.metrics import MetricsWriter, read_metrics
from tba_hpc.run.owners import Owner

LAYOUT = WeightLayout.of([("a", (3, 5))], "F32")


def config_of(root: Path = Path("runs"), **sections: dict[str, object]) -> Config:
    """Places for two core searchers and three that come and go."""
    tree: dict[str, dict[str, object]] = {
        "run": {"root": str(root)},
        "model": {"path": "tiny"},
        "generator": {"completions_per_prompt": 2},
        "train": {"completions_per_prompt": 2},
        "launch": {"searchers": 2, "elastic": 3},
    }
    return parse_config(
        {name: {**tree.get(name, {}), **sections.get(name, {})} for name in {**tree, **sections}}
    )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    before = os.umask(0o022)
    yield RunDir.create(config_of(tmp_path))
    os.umask(before)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", ATTEMPT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tba_hpc.exchange.file_exchange.MANIFEST_CHECK_SECONDS", 0.0)


# --- What may be configured ---


def test_which_searchers_are_elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    config, closed = config_of(), config_of(launch={"elastic": 0})
    assert has_no_launcher(config, None) and not has_no_launcher(config, 0)
    with pytest.raises(ConfigError, match=r"launch.elastic=0 leaves no slot .* --set launch.elastic=N"):
        has_no_launcher(closed, None)
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    assert not has_no_launcher(closed, None)
    monkeypatch.setenv(ATTEMPT, "attempt-001")
    assert not has_no_launcher(config, None)


# --- Places ---


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts a process at work on a function of this file."""
    with children() as make:
        yield make


def _take_a_place(told: Connection, path: Path) -> None:
    run = RunDir(path)
    try:
        with leased_slot(run, run.config()) as place:
            stay(told, f"{place.searcher} {place.lease}")
    except NoSlotError as error:
        told.send(str(error))


def test_rivals_get_a_slot_each_and_a_dead_ones_slot_is_taken(
    run: RunDir, start: Callable[..., Child]
) -> None:
    rivals = [start(_take_a_place, run.path) for _ in range(6)]
    answers = [rival.said() for rival in rivals]
    placed = {answer: rival for answer, rival in zip(answers, rivals, strict=True) if answer[0].isdigit()}
    assert sorted(answer.split()[0] for answer in placed) == ["5000", "5001", "5002"]
    refused = [answer for answer in answers if answer not in placed]
    assert len(refused) == 3 and all(f"all slots of {run.path} for" in answer for answer in refused)

    killed = next(answer for answer in placed if answer.startswith("5001"))
    placed[killed].kill()
    heir = start(_take_a_place, run.path)
    assert (again := heir.said()).startswith("5001 ") and again != killed, "a lease of its own"
    for rival in (*rivals, heir):
        rival.let_go()
    with leased_slot(run, run.config()) as first, leased_slot(run, run.config()) as second:
        assert (first.searcher, second.searcher) == (FIRST_ELASTIC, FIRST_ELASTIC + 1)


def test_a_silent_searchers_slot_is_free_and_one_of_the_same_job_is_not(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    there = Owner(host="node7", machine="another", pid=4711, began=1, job="17", elastic=True)
    run.owners.mkdir()
    files = [run.owners / f"searcher-500{i}.000001" for i in range(3)]
    for file in files:
        file.write_text(there.to_json())
    with pytest.raises(NoSlotError), leased_slot(run, run.config()):
        pass
    os.utime(files[2], (time.time() - owners.SILENT_OWNER_SECONDS - 5,) * 2)
    with leased_slot(run, run.config()) as place:
        assert place.searcher == FIRST_ELASTIC + 2
    files[1].write_text(replace(there, restarts="0").to_json())
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")  # back from the queue: what it left is its own
    with leased_slot(run, run.config()) as place:
        assert place.searcher == FIRST_ELASTIC


def test_elastic_searchers_do_not_keep_a_job_alive_that_is_gone(run: RunDir, tmp_path: Path) -> None:
    """Where squeue cannot be asked, its own ranks tell of it."""
    run.owners.mkdir()
    job = Owner(host="node7", machine="another", job="17")
    (run.owners / "launch.000001").write_text(job.to_json())
    os.utime(run.owners / "launch.000001", (0, 0))
    rank = run.owners / "trainer-0000.000001"
    rank.write_text(replace(job, pid=4711).to_json())
    with leased_slot(run, run.config()), pytest.raises(owners.OwnedError):
        owners.refuse_owned(run)
    os.utime(rank, (0, 0))
    with leased_slot(run, run.config()):
        owners.refuse_owned(run)


def no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("nth", range(2))
def test_the_evaluators_lease_is_taken_once_a_full_disk_has_room(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Whether or not its claim had its name already when the disk was full: that is its own."""
    monkeypatch.setattr("tba_hpc.loops.elastic.EVALUATOR_RETRY_SECONDS", 0.0)
    first, other, left, fsync = EvaluatorLease(run), EvaluatorLease(run), [nth], os.fsync

    def full_once(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == -1:
            no_room()
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_once)
    assert not first.held()
    assert first.held() and not other.held()
    first.release()
    assert other.held()
    other.release()


def test_searchers_with_a_lease_are_listed_and_those_with_weights_are_ready(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ElasticSearchers(run, run.config()).anybody(), "nor is there a folder of owners"
    names = [f"searcher-{number}" for number in run.config().launch.elastic_searchers]
    leases = [owners.take_lease(run, names) for _ in range(2)]
    assert list(owners.holders(run, names)) == names[:2]
    there = ElasticSearchers(run, run.config())
    assert there.anybody() and there.ready() == {}, "engines are still being built"
    owners.note_ready(names[1])
    assert there.ready() == {}, "seen at the next check"
    assert ElasticSearchers(run, run.config()).ready() == {FIRST_ELASTIC + 1: 1}
    with monkeypatch.context() as patch:
        patch.setattr("tba_hpc.loops.elastic.ELASTIC_CHECK_SECONDS", 0.0)
        patch.setattr(Path, "touch", no_room)
        assert there.anybody(), "as before, while the disk is full"
    for lease in leases:
        assert lease
        lease.release()
    assert owners.holders(run, names) == {}
    assert not ElasticSearchers(run, run.config()).anybody()


def test_status_tells_who_is_there_and_with_what_rate(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsWriter(run.metrics_file("searcher", FIRST_ELASTIC)).log
    monitor = RunMonitor(run)
    for variable, value in (("JOB_ID", "49"), ("ARRAY_JOB_ID", "49"), ("ARRAY_TASK_ID", "1")):
        monkeypatch.setenv(f"SLURM_{variable}", value)
    with leased_slot(run, run.config()):
        log({"search/tokens_per_second": 1234.4})
        monitor.update()
        told = facts(monitor, run_state(monitor))["elastic"]
        (visitor,) = figures(monitor)["elastic"]
    host = os.uname().nodename
    assert told.startswith(f"searcher 5000 on {host} (job 49_1) for 0:0"), "49 would be the whole array"
    assert told.endswith(", 1,234 tokens/s")
    assert (visitor["searcher"], visitor["host"], visitor["job"]) == (FIRST_ELASTIC, host, "49_1")
    assert monitor.newest == 0, "it says nothing of whether the run itself is alive"
    monitor = RunMonitor(run)
    monitor.update()
    assert "elastic" not in facts(monitor, run_state(monitor))


# --- Requests over any history of comings and goings ---


class Holder:
    """A searcher in a place: issues in order, finishes in any, seals now and then; may be frozen."""

    def __init__(self, run: RunDir, config: Config, searcher: int, completed: CompletedRequests) -> None:
        self.searcher = searcher
        self.open: list[int] = []
        self.known = CompletedRequests.from_array(completed.to_array())
        for shard in PendingShards(run).read_all({}, [searcher]):
            self.known.add(shard.trajectories.record["request_id"])
        self.writer = ShardWriter(run, searcher)
        self.share(config)

    def share(self, config: Config) -> None:
        """Ask for the requests of the place, as the run now has it."""
        launch = config.launch
        place = launch.place_of(self.searcher)
        self.stream = self.known.remaining(place, launch.places)

    def work(self, random: np.random.Generator) -> None:
        """Issue some, finish some of those, seal what is finished; refused where another has sealed."""
        issued = list(islice(self.stream, int(random.integers(0, 5))))
        self.known.add(np.array(issued, np.int64))
        self.open += issued
        random.shuffle(self.open)
        cut = int(random.integers(0, len(self.open) + 1))
        for request_id in self.open[:cut]:
            self.writer.append(*scored(request_id, request_id % 7, n=2))
        self.open = self.open[cut:]
        self.writer.seal()


@pytest.mark.parametrize(
    "seed",
    [
        *(0, 1, 2, 73),  # in the last one is at work still that has lost its place
        *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(3, 12)),
    ],
)
def test_requests_are_answered_once_over_any_history(seed: int, tmp_path: Path) -> None:
    """Comings, goings, kills, freezes, and starts of the trainer from a checkpoint with other places."""
    random, config = np.random.default_rng(seed), config_of(tmp_path)
    run = RunDir.create(config)
    metrics = MetricsWriter(run.metrics_file("trainer"))
    saved = state = TrainerState()
    completed, saved_completed = CompletedRequests(), CompletedRequests()
    buffer = ReplayBuffer(config.buffer, 0)
    holders: dict[int, Holder] = {}
    frozen: list[Holder] = []
    shards = PendingShards(run)
    answered: Counter[int] = Counter()  # by the surviving history
    saved_answered: Counter[int] = Counter()
    for _ in range(60):
        numbers = [*range(config.launch.searchers), *config.launch.elastic_searchers]
        free = [number for number in numbers if number not in holders]
        visitors = [number for number in holders if is_elastic(number)]
        match random.choice(
            ["come", "go", "kill", "freeze", "thaw", "merge", "save", "start", "work", "work"]
        ):
            case "come" if free:
                searcher = int(random.choice(free))
                holders[searcher] = Holder(run, config, searcher, completed)
            case "go" | "kill" if holders:
                del holders[int(random.choice(list(holders)))]
            case "freeze" if visitors:
                frozen.append(holders.pop(int(random.choice(visitors))))
            case "thaw" if frozen:
                with suppress(ExchangeError):  # for as long as it takes to see that its place is another's
                    frozen.pop().work(random)
            case "merge":
                before = len(read_metrics(run.metrics_file("trainer")))
                merger = Merger(buffer, completed, Freshness(config, buffer), metrics)
                found = list(shards.read(state.cursors))
                state = merger.merge(state, found, sync=0)
                for record in read_metrics(run.metrics_file("trainer"))[before:]:
                    answered.update(set(record["request_ids"]) - set(record.get("answered", [])))
            case "save":
                saved, saved_answered = state, answered.copy()
                saved_completed = CompletedRequests.from_array(completed.to_array())
            case "start":
                elastic = int(random.choice([0, 2, 3, 4]))
                launch = {"searchers": int(random.integers(elastic == 0, 4)), "elastic": elastic}
                config = config_of(tmp_path, launch=launch)
                state, answered = saved, saved_answered.copy()
                completed = CompletedRequests.from_array(saved_completed.to_array())
                buffer = ReplayBuffer(config.buffer, 0)
                placed = set(visitors) & set(config.launch.elastic_searchers)
                frozen += [holders[number] for number in set(visitors) - placed]  # still at work
                holders = {number: holders[number] for number in visitors if number in placed}
                for holder in holders.values():
                    holder.known.unite(completed)
                    holder.share(config)
            case "work":
                for searcher, holder in list(holders.items()):
                    try:
                        holder.work(random)
                    except ExchangeError:  # one that had been frozen came first
                        del holders[searcher]
    merger = Merger(buffer, completed, Freshness(config, buffer), metrics)
    before = len(read_metrics(run.metrics_file("trainer")))
    state = merger.merge(state, list(shards.read(state.cursors)), sync=0)
    for record in read_metrics(run.metrics_file("trainer"))[before:]:
        answered.update(set(record["request_ids"]) - set(record.get("answered", [])))
    assert set(answered.values()) <= {1}, "doubled"
    assert set(answered) == {r for r in range(8 * len(completed.to_array())) if r in completed}, "lost"
    rest = [
        request_id
        for place in range(config.launch.places)
        for request_id in islice(completed.remaining(place, config.launch.places), 300)
    ]
    assert set(range(300)) <= set(answered) | set(rest) and not set(answered) & set(rest), "skipped"


# --- What is merged ---


def of_version(version: int, request_id: int) -> tuple[Group, list[float], list[np.ndarray]]:
    """A scored group of two that weights of that version have sampled, different ones."""
    group, rewards, references = scored(request_id, request_id, n=2)
    return replace(group, versions=np.full((2, 2), version, np.int32)), rewards, references


def test_requests_answered_before_are_not_merged_again_and_are_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run, buffer, completed = RunDir.create(config), ReplayBuffer(config.buffer, 0), CompletedRequests()
    metrics = MetricsWriter(run.metrics_file("trainer"))
    merger = Merger(buffer, completed, Freshness(config, buffer), metrics)
    for searcher, requests in ((0, (0, 2)), (FIRST_ELASTIC, (2, 4))):
        writer = ShardWriter(run, searcher)
        for request_id in requests:
            writer.append(*of_version(3, request_id))
        writer.seal()
    state = merger.merge(TrainerState(), list(PendingShards(run).read({})), sync=13)
    assert (state.trajectories, state.added, len(buffer)) == (8, 6, 6)
    assert all(request_id in completed for request_id in (0, 2, 4))
    told = [
        [r.get(name) for name in ("again", "answered")] for r in read_metrics(run.metrics_file("trainer"))
    ]
    assert told == [[None] * 2, [2, [2]]]


# --- The exchange ---


def trainer(run: RunDir, **more: object) -> FileTrainerExchange:
    arguments: dict[str, object] = {
        "attempt": "first",
        "read_pending": PendingShards(run, timeout=60).read,
        "progress": Progress(),
        "evaluated": lambda split, step: False,
    }
    return FileTrainerExchange(run.weights, LAYOUT, **{**arguments, **more})  # type: ignore[arg-type]


def publish(exchange: FileTrainerExchange, version: int, evaluate: Split | None = None) -> None:
    while not exchange.publish(
        Publication(version=version, evaluate=evaluate), lambda out: out.fill(version)
    ):
        pass
    while not exchange.gather():
        pass


def visitor(
    run: RunDir, *, told: list[bool] | None = None, evaluates: bool = False, patience: float = 60.0
) -> ElasticSearcherExchange:
    return ElasticSearcherExchange(
        run.weights,
        FIRST_ELASTIC,
        lease=1,
        timeout=patience,
        leaving=lambda: bool(told),
        finished=lambda: run.finished,
        evaluates=lambda: evaluates,
    )


def test_a_trainer_that_restarts_lets_go_what_its_own_ranks_held_and_no_more(run: RunDir) -> None:
    lead = trainer(run)
    publish(lead, 1)
    readers = [
        FileSearcherExchange(run.weights, number, attempt="first", deadline=60.0)
        for number in (0, FIRST_ELASTIC)
    ]
    updates = [reader.poll() for reader in readers]
    assert all(updates) and len(list(run.weights.glob("held-*"))) == 2
    lead.close()
    trainer(run, attempt="second").close()
    assert [path.name[:9] for path in run.weights.glob("held-*")] == [f"held-{FIRST_ELASTIC}"]


class StillRead:
    """A world that ends once nobody reads the weights that it had published, as one without memory does."""

    stop_requested = False

    def __init__(self) -> None:
        self.file = WeightFile.copy_of(np.zeros(LAYOUT.nbytes, np.uint8))

    def publish(self, publication: Publication, write: Callable[[np.ndarray], None]) -> bool:
        return True

    def arrived(self) -> WeightUpdate:
        reader = self.file.reader()
        return WeightUpdate(Publication(version=1), LAYOUT, reader.map("r"), reader)

    def gather(self) -> bool:
        return True

    def collect(self) -> list[Shard]:
        return []

    def close(self) -> None:
        assert not self.file.has_readers, "for ever"


def test_the_end_does_not_wait_for_weights_that_go_to_files(run: RunDir) -> None:
    world = StillRead()
    both = HybridTrainerExchange(world, trainer(run), has_elastic=lambda: True)
    both.publish(Publication(version=1), lambda out: None)
    both.gather()
    both.close()


def test_a_stop_of_an_elastic_searcher_is_none_of_the_run(run: RunDir) -> None:
    told: list[bool] = []
    lead, guest = trainer(run), visitor(run, told=told)
    publish(lead, 1)
    assert (update := guest.poll()) and update.publication.version == 1 and not guest.closed
    told.append(True)
    guest.request_stop()
    assert guest.closed
    publish(lead, 2)
    assert not lead.stop_requested and not [*run.weights.glob("stop-*")]
    lead.close()


def test_an_elastic_searcher_waits_for_a_trainer_that_restarts_and_ends_with_the_run(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    lead, guest = trainer(run), visitor(run)
    publish(lead, 4)
    attempt = guest.attempt
    lead.close()
    assert not guest.closed and "stopped or is requeued: waiting 60 s at most for a resume" in caplog.text
    lead = trainer(run, attempt="second")
    publish(lead, 2)  # from an older checkpoint
    assert (attempt, guest.attempt) == ("first", "second")
    assert (update := guest.poll()) and update.publication.version == 2
    run.mark_finished()
    assert not guest.closed
    lead.close()
    assert guest.closed and visitor(run).closed


def test_a_trainer_that_stays_away_is_an_error_that_says_what_to_do(run: RunDir) -> None:
    guest = visitor(run, patience=0.05)
    with pytest.raises(
        ExchangeError, match=r"for 0\.05 s: start the run again, or raise launch\.timeout_seconds"
    ):
        while not guest.closed:
            pass


def test_only_the_evaluating_searcher_gets_weights_to_evaluate(run: RunDir) -> None:
    lead, other, judge = trainer(run), visitor(run), visitor(run, evaluates=True)
    for version in range(5):
        publish(lead, version, {1: "test", 3: "validation"}.get(version))

    def taken(guest: FileSearcherExchange) -> list[tuple[int, Split | None]]:
        updates = [guest.poll() for _ in range(4)]
        return [(u.publication.version, u.publication.evaluate) for u in updates if u]

    assert taken(other) == [(4, None)]
    assert taken(judge) == [(1, "test"), (3, "validation"), (4, None)]
    assert judge.still_wants("test", 1)
    lead.close()
    lead = trainer(run, attempt="second")
    assert not judge.still_wants("test", 1), "another trainer may make other weights of that version"
    lead.close()


# --- The end ---


def test_a_stop_before_the_work_begins_gives_the_place_back(run: RunDir, start: Callable[..., Child]) -> None:
    searcher = start(_begin, run.path)
    assert searcher.said() == "starting"
    searcher.send(signal.SIGUSR1)
    assert searcher.ended() == 0
    (file,) = run.owners.iterdir()
    assert Owner(**json.loads(file.read_text())) == Owner()


def _begin(told: Connection, path: Path) -> None:
    run = RunDir(path)
    with leaving_at_once(), leased_slot(run, run.config()):
        stay(told, "starting")


SWALLOWED = """
import ctypes, os, signal, time
from tba_hpc.loops.elastic import leaving_at_once
@ctypes.CFUNCTYPE(None)
def callback():
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.05)
with leaving_at_once():
    callback()
raise SystemExit(9)
"""


def test_a_stop_that_a_library_swallows_is_not_lost() -> None:
    """An exception ends no callback from C."""
    done = subprocess.run([sys.executable, "-c", SWALLOWED], capture_output=True)
    assert done.returncode == 0
